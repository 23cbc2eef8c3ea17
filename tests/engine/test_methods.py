"""Every method, drafter, middle level and tree emits plain decoding's tokens, and leaves its caches usable."""

from typing import NamedTuple

import pytest

from offload import EngineConfig, GenerationConfig, Sampling, Speculated, Speculation, Tokens, open_model
from offload.engine import Engine
from offload.errors import SettingsError
from offload.settings.methods import MIDDLES
from tests.support.engine import ALL, GREEDY, SMALL, fresh, run, tokens
from tests.support.models import ids, make_hf_model, make_tokenizer

T06 = Sampling(temperature=0.6, top_p=0.9, coupled=True)
T1 = Sampling(temperature=1, top_p=1, coupled=True)
PENALISED = Sampling(temperature=1, top_k=40, min_p=0.01, repetition_penalty=1.3, dry_multiplier=0.8, coupled=True)
PENALTIES = [
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"no_repeat_ngram": 2},
]
PROMPT, NEW = ids(100), 40


class Case(NamedTuple):
    """A request whose tokens are plain decoding's."""

    method: str
    draft: str
    sampling: Sampling = GREEDY
    settings: dict = {}  # noqa: RUF012 - never changed

    @property
    def name(self) -> str:
        changed = (f"{field}={value}" for field, value in self.settings.items())
        temperature, penalty = self.sampling.temperature, self.sampling.repetition_penalty
        return " ".join([self.method, self.draft, f"T{temperature:g}", f"p{penalty:g}", *changed])


def drafted(gamma1, gamma2):
    return {"gamma1": gamma1, "gamma2": gamma2}


TREES = [
    ("naive", "model", GREEDY, "k-ary:3x2x1", "without-replacement"),
    ("naive", "model", GREEDY, "40", "with-replacement"),
    ("retrieval", "none", GREEDY, "12", "top-k"),
    ("streaming", "none", GREEDY, "k-ary:2x1x1x1", "without-replacement"),
    ("triforce", "lookup", GREEDY, "k-ary:2x2x2", "without-replacement"),
    ("naive", "model", GREEDY, "auto", "top-k"),
    ("auto", "model", GREEDY, "12", "with-replacement"),
    ("retrieval", "none", GREEDY, "auto", "without-replacement"),
    ("naive", "model", T1, "k-ary:3x2", "without-replacement"),
    ("naive", "model", PENALISED, "9", "without-replacement"),
    ("lookup", "lookup", T06, "8", "without-replacement"),
    ("streaming", "none", T1, "9", "without-replacement"),
    ("triforce", "model", T06, "12", "without-replacement"),
]
CASES = [
    *(Case(method, draft) for method, draft in ALL),
    *(Case(method, draft, GREEDY, drafted(1, 1)) for method, draft in ALL if draft == "lookup"),
    *(Case(method, draft, GREEDY, drafted(3, 7)) for method, draft in ALL if draft == "model"),
    *(Case(method, draft, T06) for method, draft in ALL if method != "ar"),
    *(Case(method, "model", each) for method in ("triforce", "naive", "auto") for each in (T1, PENALISED)),
    *(Case("triforce", "model", Sampling(temperature=0, **each), drafted(2, 5)) for each in PENALTIES),
    *(Case("lookup", "lookup", Sampling(temperature=0, **each), drafted(2, 5)) for each in PENALTIES[:2]),
    *(Case(*each[:3], {"tree": each[3], "tree_sampling": each[4]}) for each in TREES),
]


@pytest.fixture(scope="module")
def plain(endless_engine):
    """`plain(sampling)`: plain decoding's tokens."""
    known = {}

    def decoded(sampling):
        if sampling not in known:
            known[sampling] = tokens(run(fresh(endless_engine), PROMPT, NEW, sampling=sampling, seed=3))
        return known[sampling]

    return decoded


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_are_those_of_plain_decoding(endless_engine, plain, case):
    """The second request goes on with the caches of the first."""
    engine = fresh(endless_engine)
    for end in (12, NEW):
        events = run(engine, PROMPT, end, case.method, case.draft, case.sampling, 3, **case.settings)
        assert tokens(events) == plain(case.sampling)[:end]


def test_penalties_change_the_text(plain):
    assert all(plain(Sampling(temperature=0, **each)) != plain(GREEDY) for each in PENALTIES)


def observing(engine):
    """Make another engine whose passes over a prompt are long enough to be observed."""
    return Engine(engine.model, (), 100, engine.draft)


@pytest.mark.parametrize("middle", [name for name, middle in MIDDLES.items() if middle.whole is None])
@pytest.mark.parametrize(("method", "draft"), [("retrieval", "none"), ("triforce", "model"), ("auto", "lookup")])
def test_every_middle_level_leaves_the_tokens_as_they_are(endless_engine, middle, method, draft):
    prompt = ids(400)
    expected = tokens(run(observing(endless_engine), prompt, 50))
    events = run(observing(endless_engine), prompt, 50, method, draft, middle=middle, **drafted(3, 5))
    assert tokens(events) == expected
    last = [event for event in events if isinstance(event, Speculated)][-1]
    assert method == "auto" or middle in {row.drafter for row in last.levels}


def test_one_session_serves_all_middle_levels_and_keeps_what_it_needs(endless_engine):
    engine, prompt = observing(endless_engine), ids(400)
    expected = tokens(run(observing(endless_engine), prompt, 20))
    full = None
    for middle in ("streaming", "retrieval", "streaming"):
        run(engine, [*prompt[:200], *ids(100, seed=4)], 5, "retrieval", middle=middle)
        assert tokens(run(engine, prompt, 20, "retrieval", middle=middle)) == expected
        cache = engine.idle_session.full.cache
        assert full in (None, cache)
        full = cache


def test_dry_stops_at_the_breakers_of_the_engine(endless_engine):
    prompt, sampling = ids(8) * 6, Sampling(temperature=0, dry_multiplier=5)
    free = tokens(run(fresh(endless_engine), prompt, 30, sampling=sampling))
    every = range(endless_engine.model.shape.vocab)
    broken = Engine(endless_engine.model, (), 16, dry_breakers=lambda: every)
    assert tokens(run(broken, prompt, 30, sampling=sampling)) == tokens(run(fresh(endless_engine), prompt, 30)) != free
    assert broken.replay(prompt, free[:1], sampling).tokens == 1


def test_the_statistics_add_up(endless_engine):
    events = run(fresh(endless_engine), ids(100), 61, "triforce", "model", gamma1=2, gamma2=5)
    runs = [len(event.ids) for event in events if isinstance(event, Tokens)]
    assert sum(runs) == 61 and 1 <= max(runs) <= 6
    last = [event for event in events if isinstance(event, Speculated)][-1]
    upper = [row for row in last.levels if row.verifier == "full"]
    assert sum(row.verifications for row in upper) == len(runs)
    assert sum(row.verifications + row.accepted for row in upper) == 61
    assert all(row.accepted <= row.verified <= row.drafted for row in last.levels)


@pytest.mark.parametrize("tree", ["k-ary:300", "k-ary:1x268x1"])
def test_a_tree_wider_than_the_vocabulary_is_refused(endless_engine, tree):
    with pytest.raises(SettingsError, match=f"tree is '{tree}', with up to .* children") as caught:
        run(endless_engine, ids(60), 5, "naive", "model", tree=tree)
    assert "k-ary:267" in caught.value.hint


def test_a_tree_as_wide_as_the_vocabulary_or_as_what_is_left_of_the_context_is_exact(endless_engine, plain):
    for tree, count in (("k-ary:267", 6), ("100", 4)):
        found = run(fresh(endless_engine), PROMPT, count, "naive", "model", tree=tree)
        assert tokens(found) == plain(GREEDY)[:count]


def loaded(target, draft, method="naive"):
    """Open a model with a draft model; return it, an engine that ends at no token, and the method."""
    config, wanted = (
        EngineConfig(model=str(target), dtype="float32", device="cpu"),
        Speculation(method, str(draft), **SMALL),
    )
    opened = open_model(config, speculation=wanted)
    engine = opened.load()
    return opened, Engine(engine.model, (), 16, engine.draft), wanted


@pytest.mark.parametrize("vocabularies", [(267, 300), (300, 267)], ids=["draft", "target"])
def test_a_vocabulary_may_be_padded(tmp_path, vocabularies):
    """A target may emit ids that its draft lacks."""
    folders = tmp_path / "target", tmp_path / "draft"
    for layers, folder, vocab in zip((2, 1), folders, vocabularies, strict=True):
        make_hf_model("llama", num_hidden_layers=layers, vocab_size=vocab).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    _, engine, wanted = loaded(*folders)
    expected = tokens(run(fresh(engine), PROMPT, 80))
    assert vocabularies[0] == 267 or max(expected) > 266
    assert tokens(engine.generate(PROMPT, GREEDY, GenerationConfig(max_new_tokens=80), wanted)) == expected


@pytest.mark.parametrize("method", ["naive", "triforce", "auto"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.5, coupled=True)], ids=["greedy", "coupled"])
def test_a_draft_model_without_some_of_the_tokens_changes_no_output(tiny_model_dir, tmp_path, method, sampling):
    make_hf_model("llama", num_hidden_layers=1, vocab_size=260).save_pretrained(tmp_path)
    make_tokenizer(special=("<|endoftext|>", "<|im_start|>", "<think>"), merges=[("t", "h")]).save_pretrained(tmp_path)
    opened, engine, wanted = loaded(tiny_model_dir, tmp_path, method)
    assert opened.barred == [2, *range(260, 267)]
    expected = tokens(run(fresh(engine), ids(50), 60, sampling=sampling))
    assert tokens(engine.generate(ids(50), sampling, GenerationConfig(max_new_tokens=60), wanted)) == expected
    assert set(expected) & set(opened.barred)
