"""Sequences of a batch: the tokens that each has alone, whoever else is in it."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload import Finished, GenerationConfig, Prefilled, Sampling, Speculation, Tokens
from offload.batching.batch import Cancelled
from offload.batching.request import BatchRequest
from offload.engine import Engine
from tests.support.engine import ALL, GREEDY, SMALL, fresh, tokens
from tests.support.models import ids

TREES = ["chain", "k-ary:2x2", "5"]
COUPLED = Sampling(temperature=0.8, coupled=True)
SEQUENCE = st.tuples(
    st.sampled_from(ALL),
    st.integers(1, 150),  # tokens of the prompt
    st.integers(1, 30),  # new ones
    st.booleans(),  # greedy
    st.sampled_from(["finish", "stop"]),
)


def request(key, method, prompt, new, sampling=GREEDY):
    name, draft = method
    settings_ = Speculation(name, "a model" if draft == "model" else draft, **SMALL, tree=TREES[key % 3])
    return BatchRequest(key, prompt, sampling, GenerationConfig(max_new_tokens=new, seed=key), settings_)


def alone(engine, wanted):
    return list(fresh(engine).generate(wanted.ids, wanted.sampling, wanted.config, wanted.speculation))


def collect(events):
    """Return the events of each sequence."""
    found = {}
    for key, event in events:
        found.setdefault(key, []).append(event)
    return found


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(SEQUENCE, min_size=1, max_size=5), st.integers(1, 4))
def test_each_sequence_has_the_tokens_that_it_has_alone(endless_engine, sequences, parallel):
    requests = [
        request(key, method, ids(length, key), new, GREEDY if greedy else COUPLED)
        for key, (method, length, new, greedy, _) in enumerate(sequences)
    ]
    stops = {key: new // 2 + 1 for key, (_, _, new, _, how) in enumerate(sequences) if how == "stop"}
    engine, found, answer = fresh(endless_engine), {}, None
    events = engine.generate_batch(requests, parallel)
    while True:
        try:
            key, event = events.send(answer)
        except StopIteration:
            break
        found.setdefault(key, []).append(event)
        counted, answer = len(tokens(found[key])), None
        if isinstance(event, Tokens) and counted >= stops.get(key, counted + 1):
            answer = stops[key]
    for wanted in requests:
        expected = alone(endless_engine, wanted)
        if wanted.key in stops and len(tokens(expected)) > stops[wanted.key]:
            expected = [Tokens(tuple(tokens(expected)[: stops[wanted.key]])), Finished("stop")]
            found[wanted.key] = [Tokens(tuple(tokens(found[wanted.key])[: stops[wanted.key]])), found[wanted.key][-1]]
        assert tokens(found[wanted.key]) == tokens(expected)


@pytest.mark.parametrize("after", [1, 20])
def test_an_interrupt_ends_all_and_leaves_the_engine_usable(endless_engine, after):
    requests = [request(key, ("triforce", "lookup"), ids(60 + key, key), 20) for key in range(3)]
    engine = fresh(endless_engine)
    events = engine.generate_batch(requests, 2)
    for _ in range(after):
        next(events)
    with pytest.raises(KeyboardInterrupt):
        events.throw(KeyboardInterrupt)
    again = collect(engine.generate_batch(requests, 3))
    assert {key: tokens(each) for key, each in again.items()} == {
        wanted.key: tokens(alone(endless_engine, wanted)) for wanted in requests
    }


def test_a_long_prompt_does_not_delay_a_sequence_by_more_than_a_chunk(endless_engine):
    """Between two tokens of one sequence, at most one chunk of the other's prompt is run."""
    engine = Engine(endless_engine.model, (), 80, endless_engine.draft)
    requests = [
        request(0, ("ar", "lookup"), ids(10), 12),
        *(request(key, ("ar", "lookup"), ids(400, key), 2) for key in (1, 2)),
    ]
    chunks, most = 0, 0
    for key, event in engine.generate_batch(requests, 3):
        if isinstance(event, Prefilled) and key and event.done:
            chunks += 1
            most = max(most, chunks)
        if isinstance(event, Tokens) and key == 0:
            chunks = 0
    assert most == 1


def test_a_sequence_joins_that_becomes_ready_while_others_run(endless_engine):
    """The second request comes from the first one's tokens, while a third one runs."""
    first, other = request(0, ("ar", "lookup"), ids(20), 3), request(1, ("ar", "lookup"), ids(30, 1), 20)
    ready, found = [first, other], {}

    def requests():
        while True:
            yield ready.pop(0) if ready else None

    for key, event in fresh(endless_engine).generate_batch(requests(), 2):
        found.setdefault(key, []).append(event)
        if key == 0 and isinstance(event, Finished):
            assert len(tokens(found[1])) < 20
            following = request(2, ("ar", "lookup"), [*first.ids, *tokens(found[0])], 4)
            ready.append(following)
    assert sorted(found) == [0, 1, 2]
    for each in (other, following):
        assert tokens(found[each.key]) == tokens(alone(endless_engine, each))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("after", [1, 20])
def test_a_cancelled_sequence_ends_alone_and_its_pages_are_free(endless_engine, after):
    """`after` events; the other sequences keep their tokens, and one that shares the beginning goes on."""
    prompt, seen = ids(300), []
    wanted = [request(key, ("triforce", "lookup"), [*prompt, *ids(9, key)], 20) for key in range(3)]
    gone = replace(wanted[0], is_cancelled=lambda: len(seen) >= after)
    for key, event in fresh(endless_engine).generate_batch([gone, *wanted[1:]], 3):
        seen.append((key, event))
    found = collect(seen)
    assert isinstance(found[0][-1], Cancelled) and not any(isinstance(each, Finished) for each in found[0])
    assert sum(isinstance(each, Cancelled) for _, each in seen) == 1
    for each in wanted[1:]:
        assert tokens(found[each.key]) == tokens(alone(endless_engine, each))
