"""Requests -> sequences: prepared, with settings resolved and seeds drawn; and their events as they come."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from offload.batching.batch import BatchEvent, Cancelled, Failed
from offload.batching.request import BatchRequest, Events
from offload.errors import PromptError, SettingsError, UsageError
from offload.events import DraftPrefilled, Event, Finished, Prefilled, Text, Thought
from offload.loading.prompt_checks import check_prompt
from offload.loading.tokenizers.text_stream import TextLayer, stream_text
from offload.loading.tokenizers.tokenizer import Tokenizer
from offload.loading.tokenizers.tool_calls import ToolFormat
from offload.metrics import Meter
from offload.settings.config import GenerationConfig, Sampling, Speculation

from ..run.opened_request import OpenedRequest
from .errors import ApiError, api_error
from .request import ApiRequest


class PromptEncoder:
    """Prepares the sequences of requests for one model. Blocks: a long prompt takes a second to encode."""

    def __init__(self, opened: OpenedRequest, context: int) -> None:
        """`context` is the most tokens of a prompt and its answer."""
        self._opened, self._context = opened, context

    def sequences(self, wanted: ApiRequest, scope: str) -> list[SequenceSettings]:
        """Return what is to be generated, prompt by prompt, each as often as there are choices. Raises ApiError.

        Choice i of a request with a seed has the seed plus i, so the first is that of the command line.
        """
        opened = self._overridden(wanted)
        settings, is_chat = opened.settings, wanted.messages is not None
        calls = None if wanted.tools is None else wanted.tools.form(opened.model.tokenizer)
        more = scope, is_chat, wanted.logprobs, calls
        found = []
        for ids in self._encoded(wanted):
            new = self._new_tokens(len(ids), wanted, settings.generation.max_new_tokens)
            for choice in range(wanted.choices):
                seed = (settings.generation.seed + choice) % 2**63
                config = replace(settings.generation, seed=seed, max_new_tokens=new)
                found.append(SequenceSettings(ids, opened.sampling, config, settings.speculation, *more))
        return found

    def _overridden(self, wanted: ApiRequest) -> OpenedRequest:
        """Return the request of one with options of its own. Raises ApiError, before its prompt is encoded."""
        options, field = dict(wanted.options), "response_format"
        if wanted.tools is not None:
            field, options["constraint"] = "tools", wanted.tools.constraint(self._opened.model.tokenizer)
        try:
            if "constraint" in options:  # compiled here, not in the engine's thread
                self._opened.model.constraints.check(options["constraint"])
        except SettingsError as error:
            raise ApiError(400, f"{error.message.replace('--grammar', field)}; {error.hint}", param=field) from None
        try:
            return self._opened.overridden(options, partial(secrets.randbits, 32), raw=wanted.messages is None)
        except UsageError as error:
            raise ApiError(400, error.message) from None

    def _encoded(self, wanted: ApiRequest) -> list[list[int]]:
        tokenizer, field = self._opened.model.tokenizer, "prompt" if wanted.messages is None else "messages"
        try:
            if wanted.messages is None:
                found = [tokenizer.encode(each, True) if isinstance(each, str) else each for each in wanted.prompts]
            elif not tokenizer.has_chat_template:
                raise ApiError(400, "this model has no chat template: use /v1/completions", param=field)
            else:
                think = self._opened.think if wanted.think is None else wanted.think
                tools = None if wanted.tools is None else wanted.tools.given
                found = [tokenizer.chat_turns(wanted.messages, think=think, tools=tools)]
            for ids in found:
                check_prompt(self._opened.model.checkpoint.shape, ids, 0)
        except PromptError as error:  # its hint is for the command line
            raise ApiError(400, error.message, param=field) from None
        return found

    def _new_tokens(self, length: int, wanted: ApiRequest, most: int) -> int:
        """Return how many tokens may follow: what was asked for, or what is left where the request does not say."""
        left, code = self._context - length, "context_length_exceeded"
        if left < 1:
            message = f"the prompt has {length:,} tokens; with the answer it may have {self._context:,} tokens"
            raise ApiError(400, message, code, "prompt" if wanted.messages is None else "messages")
        if most > left and "max_new_tokens" in wanted.options:
            message = f"max_tokens is {most:,} and the prompt has {length:,} tokens; both together may have "
            raise ApiError(400, f"{message}{self._context:,}", code, "max_tokens")
        return min(most, left)


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """What one sequence is to do: its prompt's `ids`, and the settings as of a BatchRequest.

    Thinking is told from the answer after prompts in the chat template, `is_chat`; `calls` is how calls of tools are
    written, if the request has tools.
    """

    ids: list[int]
    sampling: Sampling
    config: GenerationConfig
    speculation: Speculation
    scope: str = ""
    is_chat: bool = False
    logprobs: int | None = None
    calls: ToolFormat | None = None


class ServedSequence:
    """A sequence: measured in the engine's thread, its events handed to `post` with its number among the choices."""

    def __init__(
        self,
        settings: SequenceSettings,
        tokenizer: Tokenizer,
        post: Callable[[int, Event | Exception], None] = lambda index, event: None,
        index: int = 0,
    ) -> None:
        """The `tokenizer` is used in the engine's thread."""
        self.settings, self.index = settings, index
        self.meter = Meter(len(settings.ids))
        self.is_cancelled = False  # set by any thread
        self._tokenizer, self._post = tokenizer, post

    def request(self, key: int) -> BatchRequest:
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
        elif not isinstance(event, Cancelled):
            self.meter.observe(event)
            if isinstance(event, Prefilled | DraftPrefilled | Thought | Text | Finished):
                self._post(self.index, event)

    def fail(self, error: Exception) -> None:
        """Post an error, the last event, as what the client is told of it."""
        self._post(self.index, api_error(error))

    def _text(self, events: Events) -> Events:
        wanted = self.settings
        layer = TextLayer.after(self._tokenizer, wanted.ids, wanted.config.stop, wanted.is_chat, wanted.calls)
        return stream_text(events, layer)


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
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))
