"""Exceptions of any kind: they end the sequence that raises them, and no other."""

import gc
import weakref
from dataclasses import replace

import pytest

from offload import Finished
from offload.batching.batch import Batch, Failed
from offload.batching.lane import Lane
from offload.errors import InternalError, OutOfMemory
from offload.session.session import Session
from offload.speculation.sampling.warp import Sampler
from tests.batching.test_batch import COUPLED, alone, collect, request
from tests.support.engine import fresh, tokens
from tests.support.models import ids

BAD = 1


def raising(error, function, at):
    """Return a function that raises an exception in its call number `at`, from 1, and in all later ones."""
    calls = []

    def failing(*args, **more):
        calls.append(args)
        if len(calls) >= at:
            raise error
        return function(*args, **more)

    return failing


class Planted:
    """Plants an exception in the session of the sequence BAD, and holds only a weak reference to it."""

    def __init__(self, monkeypatch, plant):
        self.sessions, made = [], Session.__init__

        def new(session, *args, **more):
            made(session, *args, **more)
            if len(self.sessions) == BAD:
                plant(session)
            self.sessions.append(weakref.ref(session))

        monkeypatch.setattr(Session, "__init__", new)


def at_cache(name, at):
    def plant(error, monkeypatch):
        def into(session):
            cache = session.full.cache
            setattr(cache, name, raising(error, getattr(cache, name), at))

        return Planted(monkeypatch, into)

    return plant


def at_draft(error, monkeypatch):
    def into(session):
        session.runners.lookup.draft_kind = raising(error, session.runners.lookup.draft_kind, 3)

    return Planted(monkeypatch, into)


def at_sampling(error, monkeypatch):
    made = Sampler.__init__

    def new(sampler, sampling, seed, *args, **more):
        made(sampler, sampling, seed, *args, **more)
        if seed == BAD:
            sampler.choose = raising(error, sampler.choose, 4)

    monkeypatch.setattr(Sampler, "__init__", new)
    return Planted(monkeypatch, lambda session: None)


POINTS = {
    "prefill": (at_cache("begin", 2), MemoryError("4 GiB")),
    "verification": (at_cache("begin", 8), AssertionError()),
    "commit": (at_cache("commit", 7), RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    "draft": (at_draft, RuntimeError("size mismatch")),
    "sampling": (at_sampling, ValueError("a defect")),
}


def requests():
    """Four requests that draft at every step, whatever is measured."""
    wanted = [request(key, ("triforce", "lookup"), ids(40 + 30 * key, key), 16, COUPLED) for key in range(4)]
    return [replace(each, speculation=replace(each.speculation, gamma1=2, gamma2=3)) for each in wanted]


@pytest.fixture(scope="module")
def expected(endless_engine):
    return [tokens(alone(endless_engine, each)) for each in requests()]


def assert_failed(events, error):
    """Assert that the events end with a failure by this exception."""
    failed = events[-1]
    assert isinstance(failed, Failed) and not any(isinstance(each, Finished) for each in events)
    is_memory = "alloc" in str(error) or isinstance(error, MemoryError)
    assert isinstance(failed.error, OutOfMemory if is_memory else InternalError)
    assert failed.error.hint and (str(error) or type(error).__name__) in failed.error.message
    assert failed.error.__cause__ is error


@pytest.mark.parametrize(("plant", "error"), POINTS.values(), ids=POINTS)
def test_an_exception_ends_its_sequence_alone_and_frees_its_memory(endless_engine, expected, monkeypatch, plant, error):
    engine = fresh(endless_engine)
    memories, make = [], engine._batch_memory
    engine._batch_memory = lambda *args: memories.append(make(*args)) or memories[0]
    gc.disable()
    try:
        planted = plant(error, monkeypatch)
        found = collect(engine.generate_batch(requests(), 4))
        assert planted.sessions[BAD]() is None  # freed, though the error is still there
    finally:
        gc.enable()
    assert_failed(found[BAD], error)
    assert all(tokens(found[key]) == expected[key] for key in range(4) if key != BAD)
    (memory,) = memories
    if memory is not None:
        memory._free_last()
        assert memory._pool.num_free == memory._pages


def test_after_an_exception_of_a_joint_pass_each_sequence_runs_by_itself(endless_engine, expected, monkeypatch):
    """Nobody can know whose rows have raised it; memory for all of them, for example, may be too little."""
    runs = []

    def refused(*args):
        runs.append(args)
        raise MemoryError("rows of all")

    monkeypatch.setattr("offload.batching.passes.JointCache", refused)
    found = collect(fresh(endless_engine).generate_batch(requests(), 4))
    assert runs and [tokens(found[key]) for key in range(4)] == expected


def test_an_exception_of_one_rank_among_several_ends_all():
    def start(lane):
        raise ValueError("of this rank")

    assert isinstance(next(Batch(1).run([Lane("a", start)]))[1], Failed)
    with pytest.raises(ValueError, match="of this rank"):
        next(Batch(1, in_step=True).run([Lane("a", start)]))


@pytest.mark.timeout(300)
def test_a_sequence_whose_clean_up_fails_is_cancelled_alone(endless_engine, expected):
    def text(events):
        try:
            yield from events
        finally:
            raise ValueError("while cleaning up")

    wanted, seen = requests(), []
    wanted[BAD] = replace(wanted[BAD], text=text, is_cancelled=lambda: len(seen) > 20)
    for each in fresh(endless_engine).generate_batch(wanted, 4):
        seen.append(each)
    found = collect(seen)
    assert isinstance(found[BAD][-1].error, InternalError)
    assert all(tokens(found[key]) == expected[key] for key in range(4) if key != BAD)
