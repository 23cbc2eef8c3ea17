"""Every method emits plain decoding's tokens, and leaves its caches usable for the next request."""

import pytest

from offload import EngineConfig, GenerationConfig, Sampling, Speculated, Speculation, Tokens, open_model
from offload.engine import Engine
from offload.settings.config import METHODS
from tests.support.engine import ALL, GREEDY, SMALL, fresh, run, tokens
from tests.support.models import ids, make_hf_model, make_tokenizer


@pytest.fixture(scope="module")
def plain(endless_engine):
    return tokens(run(fresh(endless_engine), ids(100), 60))


@pytest.mark.daily("gammas0-*", "gammas1-*-lookup", "gammas2-*-model")
@pytest.mark.parametrize(("method", "draft"), ALL)
@pytest.mark.parametrize("gammas", [(None, None), (1, 1), (3, 7)])
def test_greedy_is_plain_greedy(endless_engine, plain, method, draft, gammas):
    found = tokens(run(fresh(endless_engine), ids(100), 60, method, draft, gamma1=gammas[0], gamma2=gammas[1]))
    assert found == plain


PENALTIES = [
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"no_repeat_ngram": 2},
]


@pytest.mark.daily("ar-*", "lookup-*", "triforce-dry*", "triforce-rep*", "streaming-freq*")
@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda penalty: next(iter(penalty)))
@pytest.mark.parametrize("method", METHODS[1:])
def test_penalties_follow_drafts_position_by_position(endless_engine, method, penalty):
    prompt, sampling = ids(60), Sampling(temperature=0, **penalty)
    expected = tokens(run(fresh(endless_engine), prompt, 60, sampling=sampling))
    assert (
        tokens(run(fresh(endless_engine), prompt, 60, method, "model", sampling=sampling, gamma1=2, gamma2=5))
        == expected
    )
    assert expected != tokens(run(fresh(endless_engine), prompt, 60))


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
    assert sum(runs) == 61
    assert 1 <= max(runs) <= 6
    last = [event for event in events if isinstance(event, Speculated)][-1]
    upper = [row for row in last.levels if row.verifier == "full"]
    assert sum(row.verifications for row in upper) == len(runs)
    assert sum(row.verifications + row.accepted for row in upper) == 61
    for row in last.levels:
        assert row.accepted <= row.verified <= row.drafted
        assert row.acceptance is None or 0 <= row.acceptance <= 1


def test_a_draft_model_may_have_a_padded_vocabulary(tiny_model_dir, tmp_path, endless_engine):
    make_hf_model("llama", num_hidden_layers=1, vocab_size=300).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    config = EngineConfig(model=str(tiny_model_dir), dtype="float32", device="cpu")
    wanted = Speculation("naive", str(tmp_path), **SMALL)
    loaded = open_model(config, speculation=wanted).load()
    engine = Engine(loaded.model, (), 16, loaded.draft)
    found = tokens(engine.generate(ids(50), GREEDY, GenerationConfig(max_new_tokens=30), wanted))
    assert found == tokens(run(fresh(endless_engine), ids(50), 30))


def test_a_target_with_a_padded_vocabulary_may_emit_ids_that_its_draft_lacks(tmp_path, draft_model_dir):
    make_hf_model("llama", vocab_size=300).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu")
    wanted = Speculation("naive", str(draft_model_dir), **SMALL)
    engine = Engine((loaded := open_model(config, speculation=wanted).load()).model, (), 16, loaded.draft)
    prompt = ids(50)
    plain = tokens(run(fresh(engine), prompt, 80))
    assert max(plain) > 266
    assert tokens(engine.generate(prompt, GREEDY, GenerationConfig(max_new_tokens=80), wanted)) == plain


@pytest.mark.parametrize("method", ["naive", "triforce", "auto"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.5, coupled=True)], ids=["greedy", "coupled"])
def test_a_draft_model_without_some_of_the_tokens_changes_no_output(
    tiny_model_dir, tmp_path, endless_engine, method, sampling
):
    make_hf_model("llama", num_hidden_layers=1, vocab_size=260).save_pretrained(tmp_path)
    make_tokenizer(special=("<|endoftext|>", "<|im_start|>", "<think>"), merges=[("t", "h")]).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tiny_model_dir), dtype="float32", device="cpu")
    wanted = Speculation(method, str(tmp_path), **SMALL)
    opened = open_model(config, speculation=wanted)
    assert opened.barred == [2, *range(260, 267)]
    loaded = opened.load()
    engine = Engine(loaded.model, (), 16, loaded.draft)
    expected = tokens(run(fresh(endless_engine), ids(50), 60, sampling=sampling))
    assert tokens(engine.generate(ids(50), sampling, GenerationConfig(max_new_tokens=60), wanted)) == expected
    assert set(expected) & set(opened.barred)
