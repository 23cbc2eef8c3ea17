"""Several requests on one engine: ends, stop strings, interrupts, and two at once."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload import Finished, GenerationConfig, Speculation, Tokens
from offload.engine import Engine
from offload.loading.tokenizers.text_stream import TextLayer, stream_text
from tests.support.engine import ALL, GREEDY, SMALL, fresh, run, tokens
from tests.support.models import ids


@pytest.mark.parametrize("method", ["lookup", "retrieval", "triforce", "naive"])
def test_an_end_of_sequence_token_inside_a_run_ends_it_there(endless_engine, method):
    prompt = ids(100)
    plain = tokens(run(fresh(endless_engine), prompt, 40))
    for end in plain[3:20:4]:
        stopping = Engine(endless_engine.model, (end,), 16, endless_engine.draft)
        events = run(stopping, prompt, 40, method, "model" if method == "naive" else "lookup", gamma1=3, gamma2=8)
        assert tokens(events) == plain[: plain.index(end)]
        assert events[-1] == Finished("eos")
        assert stopping.idle_session.full.cache.length <= len(prompt) + plain.index(end)
        assert stopping.idle_session.sequence.tokens == prompt + plain[: plain.index(end)]


def test_a_stop_string_inside_a_run_cuts_tokens_text_and_caches(endless_engine, opened_with_draft):
    prompt = ids(100)
    plain = tokens(run(fresh(endless_engine), prompt, 40))
    decode = opened_with_draft.tokenizer.decode
    stop = decode(plain[10:12])
    results = []
    for method in ("ar", "triforce"):
        engine = fresh(endless_engine)
        settings_ = Speculation(method, gamma1=3, gamma2=8, **SMALL)
        generation = engine.generate(prompt, GREEDY, GenerationConfig(max_new_tokens=40), settings_)
        events = list(stream_text(generation, TextLayer(decode, [stop], None)))
        assert events[-1] == Finished("stop")
        emitted = tokens(events)
        assert engine.idle_session.sequence.tokens == prompt + emitted
        assert engine.idle_session.full.cache.length <= len(prompt) + len(emitted)
        results.append((emitted, "".join(event.text for event in events if hasattr(event, "text"))))
    assert results[0] == results[1]
    assert len(results[0][0]) < 40


TREES = ["chain", "k-ary:2x2", "5"]
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(ALL),
        st.integers(1, 120),  # tokens of the last sequence that the next one keeps
        st.integers(1, 30),  # new prompt tokens
        st.integers(1, 12),  # events until the iterator is closed
        st.sampled_from(["finish", "close", "interrupt"]),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(REQUESTS)
def test_the_next_request_gives_the_tokens_of_a_fresh_engine_whatever_happened(endless_engine, requests):
    engine, sequence = fresh(endless_engine), ids(40)
    engine.generate(ids(300), GREEDY, GenerationConfig()).close()
    for (method, draft), kept, new, steps, how in requests:
        sequence = [*sequence[:kept], *ids(new, kept)][:200]
        wanted = Speculation(method, "a model" if draft == "model" else draft, **SMALL, tree=TREES[new % 3])
        events = engine.generate(sequence, GREEDY, GenerationConfig(max_new_tokens=20), wanted)
        emitted = left_early(engine, events, steps, how)
        sequence = [*sequence, *emitted]
        assert engine.idle_session.full.cache.length <= engine.idle_session.full.num_cached
    expected = tokens(run(fresh(endless_engine), sequence, 20))
    for method, draft in (("ar", "none"), ("triforce", "model"), ("retrieval", "none")):
        assert tokens(run(engine, sequence, 20, method, draft)) == expected


def left_early(engine, events, steps, how):
    """Take some events, then finish, close the iterator, or raise KeyboardInterrupt within a forward pass."""
    emitted, forward = [], engine.model.forward

    def interrupted(ids, cache, *tree):
        cache.begin(len(ids), *tree)
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


def test_two_requests_at_once_are_independent(endless_engine):
    engine = fresh(endless_engine)
    first = engine.generate(ids(50), GREEDY, GenerationConfig(max_new_tokens=20), Speculation("lookup"))
    for _ in range(8):
        next(first)
    second = tokens(run(engine, ids(60, 1), 20))
    assert second == tokens(run(fresh(endless_engine), ids(60, 1), 20))
    assert list(first)[-1] == Finished("length")
