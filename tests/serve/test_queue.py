"""The queue: what is refused, and the end of the thread."""

import pytest

from offload.events import Finished, Text
from triforce_cli.serve.engine_thread import EngineThread
from triforce_cli.serve.errors import ApiError
from triforce_cli.serve.sequences import ServedSequence


class Noted(ServedSequence):
    """A sequence of no model that notes its errors."""

    def __init__(self):
        self.errors, self.is_cancelled = [], False

    def request(self):
        return self

    def fail(self, error):
        self.errors.append(error)


def refusal(call, *args):
    with pytest.raises(ApiError) as caught:
        call(*args)
    return caught.value


def test_the_queue_is_bounded():
    engine = EngineThread(None, 1, 2)
    assert refusal(engine.submit, [Noted()] * 4).status == 400  # more than ever have a place
    engine.submit([Noted(), Noted()])
    error = refusal(engine.submit, [Noted(), Noted()])
    assert (error.status, error.headers) == (429, {"retry-after": "2"})
    engine.submit([Noted()])
    engine.cancel(list(engine.waiting)[:1])
    engine.submit([Noted()])
    assert len(engine.waiting) == 3


def test_a_thread_that_dies_leaves_nobody_waiting():
    class Broken:
        def generate_batch(self, requests, parallel):
            next(requests)
            yield from ()
            raise MemoryError

    def failed(error):
        raise BrokenPipeError("stderr is closed")

    engine, sequence = EngineThread(Broken(), 1, 4, failed=failed), Noted()
    engine.submit([sequence])
    engine.start()
    assert engine.stop(60) and sequence.errors and not engine.running
    assert refusal(engine.submit, [Noted()]).status == 503


def test_a_place_is_free_before_the_client_has_the_end_of_its_answer():
    """It may ask again at once."""
    running, sequence = [], Noted()

    class Engine:
        def generate_batch(self, requests, parallel):
            key = next(requests)
            yield key, Text("a")
            yield key, Finished("stop")

    engine = EngineThread(Engine(), 1, 4)
    sequence.observe = lambda event: running.append(len(engine.running))
    engine.submit([sequence])
    engine.start()
    assert engine.stop(60) and running == [1, 0]
