"""Every method gives plain decoding's tokens, and leaves its caches fit for whatever is asked next."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import make_hf_model, make_tokenizer

from offload import EngineConfig, Finished, GenerationConfig, Sampling, Speculated, Speculation, Tokens, open_model
from offload.config import METHODS
from offload.engine import Engine
from offload.errors import PromptError, SettingsError
from offload.loading.tokenizer import StopStrings, StreamDecoder, stream_text

GREEDY = Sampling(temperature=0)
SMALL = {"budget": 32, "chunk": 4, "sink": 4, "window": 16}
ALL = [
    *((method, draft) for method in METHODS if method != "naive" for draft in ("lookup", "none", "model")),
    ("naive", "model"),
]


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    make_hf_model("llama", seed=1, num_hidden_layers=1).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def opened(tiny_model_dir, draft_dir):
    config = EngineConfig(model=str(tiny_model_dir), dtype="float32", device="cpu", prefill_chunk=16)
    return open_model(config, speculation=Speculation("naive", str(draft_dir), **SMALL))


@pytest.fixture(scope="module")
def endless(opened):
    """An engine that no token ends."""
    loaded = opened.load()
    return Engine(loaded.model, (), 16, loaded._draft)


def fresh(engine):
    return Engine(engine.model, tuple(engine._eos_ids), 16, engine._draft)


def ids(count, seed=0):
    return torch.randint(3, 267, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(engine, prompt, count=40, method="ar", draft="lookup", sampling=GREEDY, seed=0, **more):
    wanted = Speculation(method, "a model" if draft == "model" else draft, **SMALL | more)
    return list(engine.generate(prompt, sampling, GenerationConfig(max_new_tokens=count, seed=seed), wanted))


def tokens(events):
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


@pytest.mark.parametrize(("method", "draft"), ALL)
@pytest.mark.parametrize("gammas", [(None, None), (1, 1), (3, 7)])
def test_greedy_is_plain_greedy(endless, method, draft, gammas):
    prompt = ids(100)
    expected = tokens(run(fresh(endless), prompt, 60))
    found = tokens(run(fresh(endless), prompt, 60, method, draft, gamma1=gammas[0], gamma2=gammas[1]))
    assert found == expected


@pytest.mark.parametrize("method", METHODS[1:])
def test_penalties_follow_drafts_position_by_position(endless, method):
    prompt, sampling = ids(60), Sampling(temperature=0, repetition_penalty=1.5)
    expected = tokens(run(fresh(endless), prompt, 60, sampling=sampling))
    assert tokens(run(fresh(endless), prompt, 60, method, "model", sampling=sampling, gamma1=2, gamma2=5)) == expected
    assert expected != tokens(run(fresh(endless), prompt, 60))


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_sample_with_fixed_draft_lengths(endless, method):
    if method == "auto":
        pytest.skip("chooses by the clock")
    options = {"method": method, "draft": "model", "sampling": Sampling(temperature=1), "gamma1": 2, "gamma2": 4}
    first, again, other = (tokens(run(fresh(endless), ids(50), 30, seed=seed, **options)) for seed in (1, 1, 2))
    assert first == again != other


def test_runs_come_whole_and_statistics_add_up(endless):
    events = run(fresh(endless), ids(100), 61, "triforce", "model", gamma1=2, gamma2=5)
    runs = [len(event.ids) for event in events if isinstance(event, Tokens)]
    assert sum(runs) == 61
    assert 1 <= max(runs) <= 6
    last = [event for event in events if isinstance(event, Speculated)][-1]
    upper = [row for row in last.levels if row.verifier == "full"]
    assert sum(row.verifications for row in upper) == len(runs)
    assert sum(row.verifications + row.accepted for row in upper) == 61
    for row in last.levels:
        assert row.accepted <= row.judged <= row.drafted
        assert row.acceptance is None or 0 <= row.acceptance <= 1


@pytest.mark.parametrize("method", ["lookup", "retrieval", "triforce", "naive"])
def test_an_end_of_sequence_token_inside_a_run_ends_it_there(endless, method):
    prompt = ids(100)
    plain = tokens(run(fresh(endless), prompt, 40))
    for end in plain[3:20:4]:
        stopping = Engine(endless.model, (end,), 16, endless._draft)
        events = run(stopping, prompt, 40, method, "model" if method == "naive" else "lookup", gamma1=3, gamma2=8)
        assert tokens(events) == plain[: plain.index(end)]
        assert events[-1] == Finished("eos")
        assert stopping._idle.full.cache.length <= len(prompt) + plain.index(end)
        assert stopping._idle.context.tokens == prompt + plain[: plain.index(end)]


def test_a_stop_string_inside_a_run_cuts_tokens_text_and_caches(endless, opened):
    prompt = ids(100)
    plain = tokens(run(fresh(endless), prompt, 40))
    decode = opened.tokenizer.decode
    stop = decode(plain[10:12])
    results = []
    for method in ("ar", "triforce"):
        engine = fresh(endless)
        settings_ = Speculation(method, gamma1=3, gamma2=8, **SMALL)
        generation = engine.generate(prompt, GREEDY, GenerationConfig(max_new_tokens=40), settings_)
        events = list(stream_text(generation, StreamDecoder(decode), StopStrings([stop])))
        assert events[-1] == Finished("stop")
        emitted = tokens(events)
        assert engine._idle.context.tokens == prompt + emitted
        assert engine._idle.full.cache.length <= len(prompt) + len(emitted)
        results.append((emitted, "".join(event.text for event in events if hasattr(event, "text"))))
    assert results[0] == results[1]
    assert len(results[0][0]) < 40


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(ALL),
        st.integers(1, 120),  # of the last sequence are kept
        st.integers(1, 30),  # new prompt tokens
        st.integers(1, 12),  # events until the caller leaves
        st.sampled_from(["finish", "close", "interrupt"]),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(REQUESTS)
def test_whatever_happened_the_next_request_is_served_as_by_a_fresh_engine(endless, requests):
    engine, sequence = fresh(endless), ids(40)
    engine.generate(ids(300), GREEDY, GenerationConfig()).close()
    for (method, draft), kept, new, steps, how in requests:
        sequence = [*sequence[:kept], *ids(new, kept)][:200]
        wanted = Speculation(method, "a model" if draft == "model" else draft, **SMALL)
        events = engine.generate(sequence, GREEDY, GenerationConfig(max_new_tokens=20), wanted)
        emitted = left_early(engine, events, steps, how)
        sequence = [*sequence, *emitted]
        assert engine._idle.full.cache.length <= engine._idle.full.num_cached
    expected = tokens(run(fresh(endless), sequence, 20))
    for method, draft in (("ar", "none"), ("triforce", "model"), ("retrieval", "none")):
        assert tokens(run(engine, sequence, 20, method, draft)) == expected


def left_early(engine, events, steps, how):
    """Take some events, then finish, close the iterator, or press Ctrl-C in the middle of a forward pass."""
    emitted, forward = [], engine.model.forward

    def interrupted(ids, cache):
        cache.begin(len(ids))
        raise KeyboardInterrupt

    try:
        for count, event in enumerate(events):
            emitted += event.ids if isinstance(event, Tokens) else []
            if count == steps and how == "close":
                events.close()
                break
            if count == steps and how == "interrupt":
                engine.model.forward = interrupted
    except KeyboardInterrupt:
        pass
    finally:
        engine.model.forward = forward
    return emitted


def test_two_requests_at_once_do_not_disturb_each_other(endless):
    engine = fresh(endless)
    first = engine.generate(ids(50), GREEDY, GenerationConfig(max_new_tokens=20), Speculation("lookup"))
    for _ in range(8):
        next(first)
    second = tokens(run(engine, ids(60, 1), 20))
    assert second == tokens(run(fresh(endless), ids(60, 1), 20))
    assert list(first)[-1] == Finished("length")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "new"),
    [("triforce", 1500), *(pytest.param(method, 4000, marks=pytest.mark.long) for method in ("triforce", "naive"))],
)
def test_thousands_of_tokens_with_a_small_window_and_budget(tmp_path, draft_dir, method, new):
    """No drift against plain decoding, and after the first 500 tokens no cache grows."""
    make_hf_model("llama", max_position_embeddings=8192).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    wanted = Speculation(method, str(draft_dir), sink=16, window=240, budget=256, gamma1=3, gamma2=6)
    config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu")
    loaded = open_model(config, speculation=wanted).load()
    engine = Engine(loaded.model, (), 512, loaded._draft)
    prompt, count = ids(20), GenerationConfig(max_new_tokens=new)
    emitted, sizes = [], []
    for event in engine.generate(prompt, Sampling(temperature=0, repetition_penalty=1.3), count, wanted):
        if isinstance(event, Tokens):
            emitted += event.ids
            if len(emitted) // 250 > len(sizes):
                sizes.append(storage())
    assert len(set(sizes[2:])) == 1
    plain = fresh(engine).generate(prompt, Sampling(temperature=0, repetition_penalty=1.3), count, Speculation("ar"))
    assert emitted == tokens(plain)


def storage():
    """Bytes of tensors that are alive, those of other tests included."""
    import gc

    return sum(x.untyped_storage().nbytes() for x in gc.get_objects() if type(x) is torch.Tensor and x.numel() > 20_000)


def test_a_draft_model_with_another_vocabulary_is_refused(tiny_model_dir, tmp_path):
    make_hf_model("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match=r"268 tokens .* 267; id 267 is '<other>' .* None"):
        open_model(EngineConfig(model=str(tiny_model_dir)), speculation=Speculation("naive", str(tmp_path)))


def test_a_draft_model_with_a_padded_vocabulary_is_welcome(tiny_model_dir, tmp_path, endless):
    make_hf_model("llama", num_hidden_layers=1, vocab_size=300).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    config = EngineConfig(model=str(tiny_model_dir), dtype="float32", device="cpu")
    wanted = Speculation("naive", str(tmp_path), **SMALL)
    loaded = open_model(config, speculation=wanted).load()
    engine = Engine(loaded.model, (), 16, loaded._draft)
    found = tokens(engine.generate(ids(50), GREEDY, GenerationConfig(max_new_tokens=30), wanted))
    assert found == tokens(run(fresh(endless), ids(50), 30))


def test_a_target_with_a_padded_vocabulary_may_say_what_its_draft_does_not_know(tmp_path, draft_dir):
    make_hf_model("llama", vocab_size=300).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu")
    wanted = Speculation("naive", str(draft_dir), **SMALL)
    engine = Engine((loaded := open_model(config, speculation=wanted).load()).model, (), 16, loaded._draft)
    prompt = ids(50)
    plain = tokens(run(fresh(engine), prompt, 80))
    assert max(plain) > 266
    assert tokens(engine.generate(prompt, GREEDY, GenerationConfig(max_new_tokens=80), wanted)) == plain


def test_a_replay_of_a_run_that_ended_early_has_the_same_rotations(tmp_path):
    """With length-dependent RoPE a shorter sequence would be another model."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    make_hf_model("llama", max_position_embeddings=64, rope_parameters=rope).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    engine = open_model(EngineConfig(model=str(tmp_path), dtype="float32", device="cpu")).load().without_end()
    emitted = tokens(run(engine, ids(40), 200))[:30]
    assert engine.replay(ids(40), emitted, length=240).equal
    assert not engine.replay(ids(40), emitted).lossless


def test_a_replay_of_another_prompt_does_not_disturb_the_next_request(endless):
    engine = fresh(endless)
    first = tokens(run(engine, ids(60), 20))
    engine.replay(ids(60, 1), ids(20, 2))
    assert tokens(run(engine, ids(60), 20)) == first


def test_an_empty_prompt_is_refused(endless):
    with pytest.raises(PromptError, match="empty"):
        run(fresh(endless), [])


def test_a_window_beyond_the_draft_s_context_is_refused(tiny_model_dir, draft_dir):
    wanted = Speculation("naive", str(draft_dir), window=4000)
    with pytest.raises(SettingsError, match="2,048 tokens is shorter than its cache"):
        open_model(EngineConfig(model=str(tiny_model_dir)), speculation=wanted)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "magic"}, "method is 'magic'"),
        ({"method": "naive"}, "naive needs a draft model"),
        ({"budget": 8, "chunk": 8}, "budget is 8"),
        ({"gamma2": 0}, "gamma2 is 0"),
        ({"window": 0}, "window is 0"),
        ({"rebuild_every": 0}, "rebuild-every is 0"),
    ],
)
def test_impossible_settings_are_refused(wrong, message):
    with pytest.raises(SettingsError, match=message):
        Speculation(**wrong)


def test_the_replay_finds_what_plain_decoding_would_not_have_said(endless):
    engine, prompt = fresh(endless), ids(100)
    emitted = tokens(run(engine, prompt, 30, "triforce"))
    result = engine.replay(prompt, emitted)
    assert result.equal
    assert result.lossless
    wrong = [*emitted[:12], (emitted[12] + 1) % 267, *emitted[13:]]
    result = engine.replay(prompt, wrong)
    first = result.divergences[0]
    assert (first.position, first.emitted, first.expected) == (12, wrong[12], emitted[12])
    assert first.margin > 10 * first.noise
    assert not result.lossless


def test_the_replay_tells_the_narrowest_decision(endless):
    """As a run of torch's own operations over the same tokens has it."""
    engine, prompt = fresh(endless), ids(100)
    emitted = tokens(run(engine, prompt, 30))
    closest = engine.replay(prompt, emitted).closest
    model = engine.model
    logits = model.logits(model.forward(torch.tensor([*prompt, *emitted]), model.new_cache(130)))[99:-1]
    best = logits.topk(2)
    margins = best.values[:, 0] - best.values[:, 1]
    assert closest.position == int(margins.argmin())
    assert [closest.chosen, closest.runner_up] == best.indices[closest.position].tolist()
    assert closest.margin == pytest.approx(float(margins.min()), rel=1e-2)
    assert closest.within_rounding == (closest.margin <= 2 * closest.noise)
    assert engine.replay(prompt, []).closest is None
