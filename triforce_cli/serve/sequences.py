"""The served model and its sequences: prepared from requests, run in the engine's thread, their events posted."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from offload.batching.batch import BatchEvent, Cancelled, Failed
from offload.batching.request import BatchRequest, Events
from offload.errors import PromptError, SettingsError, UsageError
from offload.events import DraftPrefilled, Event, Finished, Prefilled, Text, Thought
from offload.loading.prompt_checks import check_prompt
from offload.loading.tokenizers.chat_template import ChatMessage
from offload.loading.tokenizers.text_stream import TextLayer, stream_text
from offload.loading.tokenizers.tokenizer import Tokenizer
from offload.loading.tokenizers.tool_calls import ToolFormat
from offload.metrics import Meter
from offload.settings.config import GenerationConfig, Sampling, Speculation
from offload.short_repr import short_repr

from ..run.opened_request import OpenedRequest
from .errors import ApiError, api_error
from .request import ApiRequest


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """The prompt's `ids` of one sequence, and the settings of its BatchRequest.

    `is_chat`: the prompt is in the chat template, so the answer may begin with thinking. `calls`: how calls of tools
    are written, if the request has tools.
    """

    ids: list[int]
    sampling: Sampling
    config: GenerationConfig
    speculation: Speculation
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

    def sequences(self, wanted: ApiRequest) -> list[SequenceSettings]:
        """Return the sequences of a request, prompt by prompt, each as often as there are choices. Raises ApiError.

        Choice i of a request with a seed has the seed plus i, so the first is that of the command line. Blocks: a long
        prompt takes a second to encode.
        """
        opened, form = self._opened, None
        if wanted.tools is not None:
            try:
                form = opened.model.tokenizer.tool_format
            except PromptError as error:
                raise ApiError(400, error.message, "unsupported_field", "tools") from None
        opened = self._overridden(wanted, form)
        settings = opened.settings
        sequences = []
        for ids in self._encoded(wanted):
            new = self._new_tokens(len(ids), wanted, settings.generation.max_new_tokens)
            for choice in range(wanted.choices):
                seed = ((settings.generation.seed or 0) + choice) % 2**63
                config = replace(settings.generation, seed=seed, max_new_tokens=new)
                more = settings.speculation, wanted.messages is not None, wanted.logprobs, form
                sequences.append(SequenceSettings(ids, opened.sampling, config, *more))
        return sequences

    def _overridden(self, wanted: ApiRequest, form: ToolFormat | None) -> OpenedRequest:
        """Return the command's request with the options of a client's. Raises ApiError."""
        options, field = dict(wanted.options), "response_format"
        if wanted.tools is not None and form is not None:
            special = self._opened.model.tokenizer.special_ids
            field, options["constraint"] = "tools", wanted.tools.constraint(form, special)
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
        """Return the prompts of a request as tokens. Raises ApiError."""
        tokenizer = self._opened.model.tokenizer
        try:
            if wanted.messages is None:
                prompts = [tokenizer.encode(text, True) if isinstance(text, str) else text for text in wanted.prompts]
            elif not tokenizer.has_chat_template:
                raise ApiError(400, "this model has no chat template: use /v1/completions", param="messages")
            else:
                prompts = [self._conversation(wanted, wanted.messages)]
            for ids in prompts:
                check_prompt(self._opened.model.checkpoint.shape, ids, 0)
        except PromptError as error:  # its hint is for the command line
            raise ApiError(400, error.message, param=wanted.prompt_field) from None
        return prompts

    def _conversation(self, wanted: ApiRequest, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens of a conversation. Raises ApiError and PromptError."""
        tokenizer, think, variables = self._opened.model.tokenizer, wanted.think, dict(wanted.variables)
        template = tokenizer.chat_template
        if unknown := sorted(variables.keys() - template.variables):
            message = f"this model's chat template has no variable {short_repr(unknown[0])}"
            raise ApiError(400, message, "unknown_field", "chat_template_kwargs")
        if wanted.effort is not None and "reasoning_effort" in template.variables:
            variables["reasoning_effort"] = wanted.effort
        elif wanted.effort == "none" and think is None and template.switch is not None:
            think = False
        if any("content" in message.more for message in messages) and not template.takes_parts:
            texts = [{name: value for name, value in each.more.items() if name != "content"} for each in messages]
            messages = [replace(message, more=more) for message, more in zip(messages, texts, strict=True)]
        tools = None if wanted.tools is None else wanted.tools.given
        think = self._opened.think if think is None else think
        return tokenizer.chat_turns(messages, think=think, tools=tools, variables=variables)

    def _new_tokens(self, length: int, wanted: ApiRequest, most: int) -> int:
        """Return how many tokens may follow: what was asked for, or what is left where the request does not say."""
        left, limit = self.context - length, f"this model's maximum context length is {self.context:,} tokens"
        code = "context_length_exceeded"  # clients look for it, and for the words above
        if left < 1:
            raise ApiError(400, f"{limit}; the prompt has {length:,}", code, wanted.prompt_field)
        if most > left and "max_new_tokens" in wanted.options:
            message = f"{limit}; the prompt has {length:,}, and max_tokens is {most:,}"
            raise ApiError(400, message, code, "max_tokens")
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
