"""The queue: what is counted in it, what is refused before a prompt is encoded, and the end of the thread."""

import asyncio
import time

import pytest

from offload.errors import TriforceError
from offload.events import Finished, Text
from offload.loading.tokenizers.chat_template import USER, ChatMessage
from triforce_cli.serve.api_errors import ApiError
from triforce_cli.serve.api_request import ApiRequest
from triforce_cli.serve.encoding_threads import EncodingThreads
from triforce_cli.serve.engine_thread import EngineThread
from triforce_cli.serve.sequences import PromptEncoder

CONTEXT = 32


class Sequence:
    """A sequence that notes its errors."""

    def __init__(self):
        self.errors, self.is_cancelled, self.begun = [], False, 0.0

    def request(self, key):
        return key

    def observe(self, event):
        pass

    def fail(self, error):
        self.errors.append(error)


def status(call, *args):
    with pytest.raises(ApiError) as caught:
        call(*args)
    return caught.value.status


def test_requests_whose_prompts_are_being_encoded_count_and_are_released():
    engine = EngineThread(None, 1, 2)
    with engine.reserved(2):
        assert status(engine.submit, [Sequence(), Sequence()]) == 429
        engine.submit([Sequence()])
        assert status(engine.reserved(1).__enter__) == 429
    with pytest.raises(TriforceError), engine.reserved(2):
        raise TriforceError("of the encoder")
    engine.submit([Sequence(), Sequence()])
    assert engine.num_waiting == 3


def test_more_sequences_than_ever_have_a_place_are_refused_for_good():
    assert status(EngineThread(None, 1, 2).reserved(4).__enter__) == 400


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_leaves_nobody_waiting():
    class Broken:
        def generate_batch(self, requests, parallel):
            next(requests)
            yield from ()
            raise MemoryError

    def failed(error):
        raise BrokenPipeError("stderr is closed")

    engine, sequence = EngineThread(Broken(), 1, 4, failed=failed), Sequence()
    engine.submit([sequence])
    engine.start()
    engine._thread.join(60)
    assert sequence.errors and engine.num_running == 0
    assert status(engine.submit, [Sequence()]) == 503


def test_the_time_in_the_queue_is_not_that_of_a_sequence(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    engine, sequence = EngineThread(None, 1, 4), Sequence()
    before = engine._seconds
    engine.submit([sequence])
    now[0] += 1000
    engine._next()
    now[0] += before
    engine._observe(0, Finished("stop"))
    assert engine._seconds == pytest.approx(before)


def test_a_place_is_free_before_the_client_has_the_end_of_its_answer():
    """It may ask again at once."""
    running, engine, sequence = [], EngineThread(None, 1, 4), Sequence()
    sequence.observe = lambda event: running.append(engine.num_running)
    engine.submit([sequence])
    engine._next()
    for event in (Text("a"), Finished("stop")):
        engine._observe(0, event)
    assert running == [1, 0]


@pytest.fixture
def encoder(opened, monkeypatch):
    found = PromptEncoder(opened, CONTEXT)
    for name in ("encode", "chat_turns"):
        monkeypatch.setattr(opened.model.tokenizer, name, lambda *args, **kwargs: pytest.fail("it was encoded"))
    return found


def test_what_cannot_fit_is_refused_before_it_is_encoded(opened, encoder):
    text = "a" * (CONTEXT * max(map(len, opened.model.tokenizer.vocabulary)) + 1)
    for content in ({"prompts": ["a", text]}, {"prompts": [[1] * CONTEXT]}, {"messages": [ChatMessage(USER, text)]}):
        with pytest.raises(ApiError, match="may have 32 tokens") as caught:
            encoder.sequences(ApiRequest(None, {}, 1, False, False, False, **content), "")
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    with pytest.raises(
        ApiError, match="max_tokens is 32 and the prompt has 1 tokens; both together may have 32"
    ) as caught:
        encoder.sequences(ApiRequest(None, {"max_new_tokens": CONTEXT}, 1, False, False, False, prompts=[[1]]), "")
    assert caught.value.param == "max_tokens"


def test_a_panic_of_a_library_ends_the_waiting():
    class Panic(BaseException):
        pass

    def panicking():
        raise Panic("in Rust")

    with pytest.raises(RuntimeError, match="Panic: in Rust"):
        asyncio.run(asyncio.wait_for(EncodingThreads().run(panicking), 10))
