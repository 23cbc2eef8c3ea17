"""Requests -> sequences: prepared, with settings resolved and seeds drawn; and their events as they come."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from offload.batching.batch import BatchEvent, Cancelled, Failed
from offload.batching.request import BatchRequest, Events
from offload.errors import PromptError, UsageError
from offload.events import DraftPrefilled, Event, Finished, Prefilled, Text, Thought
from offload.loading.prompt_checks import check_prompt
from offload.loading.tokenizers.text_stream import TextLayer, stream_text
from offload.loading.tokenizers.tokenizer import Tokenizer
from offload.loading.tokenizers.tool_calls import ToolFormat
from offload.metrics import Meter
from offload.settings.config import GenerationConfig, Sampling, Speculation

from ..run.model_request import ModelRequest
from .api_errors import ApiError, api_error
from .api_request import ApiRequest, Prompt
from .tools import check_schema

_TOO_LONG = "context_length_exceeded"


class PromptEncoder:
    """Prepares the sequences of requests for one model. Blocks: a long prompt takes a second to encode."""

    def __init__(self, opened: ModelRequest, context: int) -> None:
        """`context` is the most tokens of a prompt and its answer."""
        self._opened, self._context = opened, context
        # No token stands for more text than its own name has: what is longer need not be encoded to be refused.
        self._most_characters = context * max(map(len, opened.model.tokenizer.vocabulary))

    def sequences(self, wanted: ApiRequest, scope: str) -> list[SequenceSettings]:
        """Return what is to be generated, prompt by prompt, each as often as there are choices. Raises ApiError.

        Choice i of a request with a seed has the seed plus i, so the first is that of the command line.
        """
        opened = self._overridden(wanted)
        settings = opened.settings
        first = settings.generation.seed
        assert first is not None, "the request, the command, or a draw gives one"
        found = []
        for ids in self._encoded(wanted):
            try:
                check_prompt(self._opened.model.checkpoint.shape, ids, 0)
            except PromptError as error:
                raise ApiError(400, error.message, param="prompt") from None
            new = self._new_tokens(len(ids), wanted, settings.generation.max_new_tokens)
            for choice in range(wanted.choices):
                config = replace(settings.generation, seed=(first + choice) % 2**63, max_new_tokens=new)
                is_chat = wanted.messages is not None
                calls = None if wanted.tools is None else wanted.tools.form(opened.model.tokenizer)
                more = scope, is_chat, wanted.logprobs, calls
                found.append(SequenceSettings(ids, opened.sampling, config, settings.speculation, *more))
        return found

    def _overridden(self, wanted: ApiRequest) -> ModelRequest:
        """Return the request of one with options of its own. Raises ApiError, before its prompt is encoded."""
        raw, options, check = wanted.messages is None, dict(wanted.options), self._opened.model.constraints.check
        if "constraint" in options:
            check_schema(check, options["constraint"], "response_format")
        if wanted.tools is not None:
            wanted.tools.check(check)
            options["constraint"] = wanted.tools.constraint(self._opened.model.tokenizer)
            check_schema(check, options["constraint"], "tools")  # compiled here, not in the engine's thread
        try:
            return self._opened.overridden(options, partial(secrets.randbits, 32), raw=raw)
        except UsageError as error:
            raise ApiError(400, error.message) from None

    def count_tokens(self, text: str) -> int:
        """Return the tokens of a text, which a prompt and an answer to it can still be around. Raises ApiError."""
        tokens = None if len(text) > self._most_characters else len(self._opened.model.tokenizer.encode(text, False))
        if tokens is None or tokens >= self._context:
            found = f"{len(text):,} characters" if tokens is None else f"{tokens:,} tokens"
            message = f"the document has {found}; with a question and its answer it may have {self._context:,} tokens"
            raise ApiError(400, message, _TOO_LONG)
        return tokens

    def _encoded(self, wanted: ApiRequest) -> list[list[int]]:
        self._check_lengths(wanted)
        if wanted.messages is None:
            return [self._ids(prompt) for prompt in wanted.prompts]
        tokenizer = self._opened.model.tokenizer
        if not tokenizer.has_chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions", param="messages")
        try:
            tools = None if wanted.tools is None else wanted.tools.given
            return [tokenizer.chat_turns(wanted.messages, think=self._think(wanted), tools=tools)]
        except PromptError as error:  # its hint is for the command line
            raise ApiError(400, error.message, param="messages") from None

    def _check_lengths(self, wanted: ApiRequest) -> None:
        """Raise ApiError for a prompt that cannot fit into the context, before the time to encode it is spent."""
        lengths = [len(each) for each in wanted.prompts if isinstance(each, str)]
        lengths.append(sum(len(each.content) for each in wanted.messages or ()))
        ids = max((len(each) for each in wanted.prompts if not isinstance(each, str)), default=0)
        if ids < self._context and max(lengths) <= self._most_characters:
            return
        raise self._too_long(wanted, f"{ids:,} tokens" if ids >= self._context else f"{max(lengths):,} characters")

    def _too_long(self, wanted: ApiRequest, found: str) -> ApiError:
        message = f"the prompt has {found}; with the answer it may have {self._context:,} tokens"
        return ApiError(400, message, _TOO_LONG, wanted.content)

    def _think(self, wanted: ApiRequest) -> bool | None:
        """Return whether a reasoning model is to think, as the request says, else the command; None: its default."""
        usual = {"on": True, "off": False}.get(self._opened.request.think)
        return usual if wanted.think is None else wanted.think

    def _ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return self._opened.model.tokenizer.encode(prompt, True)

    def _new_tokens(self, length: int, wanted: ApiRequest, most: int) -> int:
        """Return how many tokens may follow: what was asked for, or what is left where the request does not say."""
        left = self._context - length
        if left < 1:
            raise self._too_long(wanted, f"{length:,} tokens")
        if most > left and "max_new_tokens" in wanted.options:
            message = f"max_tokens is {most:,} and the prompt has {length:,} tokens; both together may have "
            raise ApiError(400, f"{message}{self._context:,}", _TOO_LONG, "max_tokens")
        return min(most, left)


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
    calls: ToolFormat | None = None  # how calls of tools are written, if the request has tools


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
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))
        except RuntimeError:  # the loop is closed: nobody waits any more
            pass
