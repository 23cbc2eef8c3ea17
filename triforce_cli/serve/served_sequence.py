"""A sequence that a client waits for, and the answer to one request: its sequences, and their events as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from offload.batching.batch import BatchEvent, Cancelled, Failed
from offload.batching.request import BatchRequest, Events
from offload.events import DraftPrefilled, Event, Finished, Prefilled, Text, Thought
from offload.loading.tokenizers.text_stream import TextLayer, stream_text
from offload.loading.tokenizers.tokenizer import Tokenizer
from offload.metrics import Meter
from offload.settings.config import GenerationConfig, Sampling, Speculation

from .api_errors import api_error

_SENT = (Prefilled, DraftPrefilled, Thought, Text, Finished)  # events that a client may see


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """What one sequence is to do: its prompt's `ids`, and the settings as of a BatchRequest.

    `scope` separates caches, and `logprobs` are wanted, as in BatchRequest. Thinking is told from the answer after
    prompts in the chat template, `is_chat`.
    """

    ids: list[int]
    sampling: Sampling
    config: GenerationConfig
    speculation: Speculation
    scope: str = ""
    is_chat: bool = False
    logprobs: int | None = None


class ServedSequence:
    """A sequence: measured in the engine's thread, its events handed to `post` with its number among the choices."""

    def __init__(
        self,
        settings: SequenceSettings,
        tokenizer: Tokenizer,
        post: Callable[[int, Event | Exception], None],
        index: int = 0,
    ) -> None:
        """The `tokenizer` is used in the engine's thread."""
        self.settings, self.index = settings, index
        self.meter = Meter(len(settings.ids))
        self.begun = 0.0  # when it left the queue, by time.monotonic
        self.is_cancelled = False  # set by any thread
        self._tokenizer, self._post = tokenizer, post

    def request(self, key: int) -> BatchRequest:
        """Return what the batch is to do."""
        wanted = self.settings
        return BatchRequest(
            *(key, wanted.ids, wanted.sampling, wanted.config, wanted.speculation, self._text),
            is_cancelled=lambda: self.is_cancelled,
            scope=wanted.scope,
            logprobs=wanted.logprobs,
        )

    def observe(self, event: BatchEvent) -> None:
        """Measure an event, and post what a client may see of it."""
        if isinstance(event, Failed):
            self.fail(event.error)
            return
        if isinstance(event, Cancelled):
            return
        self.meter.observe(event)
        if isinstance(event, _SENT):
            self._post(self.index, event)

    def fail(self, error: Exception) -> None:
        """Post an error, the last event, as what the client is told of it."""
        self._post(self.index, api_error(error))

    def _text(self, events: Events) -> Events:
        wanted = self.settings
        return stream_text(events, TextLayer.after(self._tokenizer, wanted.ids, wanted.config.stop, wanted.is_chat))


class Answer:
    """The sequences of one request. To be made, and read, in the event loop."""

    def __init__(self, settings: Sequence[SequenceSettings], tokenizer: Tokenizer) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()
        self.sequences = [ServedSequence(each, tokenizer, self._post, index) for index, each in enumerate(settings)]

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield the events of all sequences, each with its number, until all have finished. Raises their errors."""
        left = len(self.sequences)
        while left:
            index, event = await self._queue.get()
            if isinstance(event, Exception):
                raise event
            left -= isinstance(event, Finished)
            yield index, event

    def _post(self, index: int, event: Event | Exception) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))
        except RuntimeError:  # the loop is closed: nobody waits any more
            pass
