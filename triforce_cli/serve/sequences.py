"""The served model and its sequences: prepared from requests, run in the engine's thread, their events posted."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """The prompt's `ids` of one sequence, and the settings of its BatchRequest: values that are sent to other ranks.

    `is_chat`: the prompt is in the chat template, so the answer may begin with thinking. `calls`: how calls of tools
    are written, if the request has tools.
    """

    ids: list[int]
    sampling: Sampling
    config: GenerationConfig
    speculation: Speculation
    scope: str = ""
    is_chat: bool = False
    logprobs: int | None = None
    calls: ToolFormat | None = None


class ServedModel:
    """The model that is served: its `name`, and the longest `context`, prompt and answer, in tokens.

    The `tokenizer` decodes answers in the engine's thread, and encodes nothing.
    """

    def __init__(self, opened: OpenedRequest, context: int) -> None:
        path = Path(opened.settings.engine.model)
        self.name = path.resolve().name if path.exists() else opened.settings.engine.model
        self.context, self._opened = context, opened
        self.tokenizer = opened.model.checkpoint.load_tokenizer()

    def sequences(self, wanted: ApiRequest, scope: str) -> list[SequenceSettings]:
        """Return the sequences of a request, prompt by prompt, each as often as there are choices. Raises ApiError.

        Choice i of a request with a seed has the seed plus i, so the first is that of the command line. Blocks: a long
        prompt takes a second to encode.
        """
        opened = self._overridden(wanted)
        settings = opened.settings
        calls = None if wanted.tools is None else wanted.tools.form(opened.model.tokenizer)
        sequences = []
        for ids in self._encoded(wanted):
            new = self._new_tokens(len(ids), wanted, settings.generation.max_new_tokens)
            for choice in range(wanted.choices):
                seed = ((settings.generation.seed or 0) + choice) % 2**63
                config = replace(settings.generation, seed=seed, max_new_tokens=new)
                more = settings.speculation, scope, wanted.messages is not None, wanted.logprobs, calls
                sequences.append(SequenceSettings(ids, opened.sampling, config, *more))
        return sequences

    def _overridden(self, wanted: ApiRequest) -> OpenedRequest:
        """Return the command's request with the options of a client's. Raises ApiError."""
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
        tokenizer = self._opened.model.tokenizer
        try:
            if wanted.messages is None:
                prompts = [tokenizer.encode(text, True) if isinstance(text, str) else text for text in wanted.prompts]
            elif not tokenizer.has_chat_template:
                raise ApiError(400, "this model has no chat template: use /v1/completions", param="messages")
            else:
                think = self._opened.think if wanted.think is None else wanted.think
                tools = None if wanted.tools is None else wanted.tools.given
                prompts = [tokenizer.chat_turns(wanted.messages, think=think, tools=tools)]
            for ids in prompts:
                check_prompt(self._opened.model.checkpoint.shape, ids, 0)
        except PromptError as error:  # its hint is for the command line
            raise ApiError(400, error.message, param=wanted.field) from None
        return prompts

    def _new_tokens(self, length: int, wanted: ApiRequest, most: int) -> int:
        """Return how many tokens may follow: what was asked for, or what is left where the request does not say."""
        left, code = self.context - length, "context_length_exceeded"
        if left < 1:
            message = f"the prompt has {length:,} tokens; with the answer it may have {self.context:,} tokens"
            raise ApiError(400, message, code, wanted.field)
        if most > left and "max_new_tokens" in wanted.options:
            message = f"max_tokens is {most:,} and the prompt has {length:,} tokens; both together may have "
            raise ApiError(400, f"{message}{self.context:,}", code, "max_tokens")
        return min(most, left)


class ServedSequence:
    """A sequence: measured in the engine's thread, which hands the events that clients may see to `post`."""

    def __init__(
        self,
        settings: SequenceSettings,
        tokenizer: Tokenizer,
        post: Callable[[Event | Exception], None] = lambda event: None,
    ) -> None:
        """The `tokenizer` is used in the engine's thread."""
        self.settings, self._tokenizer, self._post = settings, tokenizer, post
        self.meter = Meter(len(settings.ids))
        self.is_cancelled = False  # set by any thread

    def request(self) -> BatchRequest:
        """Return the request for the engine, whose key is the sequence."""
        wanted = self.settings
        return BatchRequest(
            *(self, wanted.ids, wanted.sampling, wanted.config, wanted.speculation, self._text),
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
                self._post(event)

    def fail(self, error: Exception) -> None:
        """Post an error, the last event, as the error that the client gets."""
        self._post(api_error(error))

    def _text(self, events: Events) -> Events:
        wanted = self.settings
        layer = TextLayer.after(self._tokenizer, wanted.ids, wanted.config.stop, wanted.is_chat, wanted.calls)
        return stream_text(events, layer)
