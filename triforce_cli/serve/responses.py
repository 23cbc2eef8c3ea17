"""Answers of the OpenAI API: events -> response objects and log-probabilities, whole or as server-sent events."""

import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.events import DraftPrefilled, Event, Finished, Prefilled, ScoredToken, Text, Thought
from offload.metrics import Meter

from .errors import ApiError, api_error, event_text
from .sequences import Answer
from .tools import CallDeltas

_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
_LEAST = -9999.0  # for a probability of 0: JSON has no infinity
TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an answer: that of a chat or of a completion, with the name of the model.

    With `token_bytes`, which returns the bytes of a token, it has the log-probabilities of its tokens.
    """

    is_chat: bool
    model: str
    token_bytes: TokenBytes | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def response(self, choices: list[dict[str, Any]], chunk: bool = False, **more: Any) -> dict[str, Any]:
        """Return a response, or a chunk of one."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.is_chat else "text_completion"
        prefix = "chatcmpl-" if self.is_chat else "cmpl-"
        head = {"id": prefix + self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": choices} | more

    def choice(self, index: int, content: dict[str, Any], tokens: Sequence[ScoredToken], reason: str | None) -> Any:
        """Return a choice, or a part of one. `tokens` are those of its text, if their log-probabilities are wanted."""
        logprobs = None
        if self.token_bytes is not None and (tokens or "delta" not in content):
            logprobs = (chat_logprobs if self.is_chat else completion_logprobs)(tokens, self.token_bytes)
        return {"index": index} | content | {"logprobs": logprobs, "finish_reason": reason}


class Choice:
    """One answer of a request, as its events come: parts of it, and at the end the whole."""

    def __init__(self, index: int, form: Form, calls: CallDeltas | None) -> None:
        self._index, self._form, self._calls = index, form, calls
        self._text, self._thought, self._tokens, self._reason = "", "", list[ScoredToken](), "length"

    def parts(self, event: Event) -> Iterator[dict[str, Any]]:
        """Yield what an event adds, as choices of chunks: one call's fragment in each."""
        if isinstance(event, Thought) and event.text:
            self._thought += event.text
            yield self._part({"reasoning_content": event.text})
        elif isinstance(event, Text):
            text, calls = (event.text, []) if self._calls is None else self._calls.feed(event.text)
            yield from self._texts(text, event.tokens)
            for call in calls:
                yield self._part({"tool_calls": [call]})
        elif isinstance(event, Finished):
            yield from self._texts("" if self._calls is None else self._calls.flush())
            is_call = self._calls is not None and self._calls.are_whole
            self._reason = "tool_calls" if is_call and event.reason != "length" else _REASONS[event.reason]
            yield self._part({}, reason=self._reason)

    def _texts(self, text: str, tokens: Sequence[ScoredToken] = ()) -> Iterator[dict[str, Any]]:
        self._text += text
        self._tokens += tokens
        if text or tokens:
            yield self._part({"content": text}, tokens)

    def begin(self) -> dict[str, Any]:
        return self._part({"role": "assistant", "content": ""})

    def _part(
        self, delta: dict[str, Any], tokens: Sequence[ScoredToken] = (), reason: str | None = None
    ) -> dict[str, Any]:
        content = {"delta": delta} if self._form.is_chat else {"text": delta.get("content", "")}
        part = self._form.choice(self._index, content, tokens, reason)
        return part if tokens else part | {"logprobs": None}

    def whole(self) -> dict[str, Any]:
        """Return the whole choice: of a reasoning model, with what it has thought apart from the answer, as in vLLM."""
        if not self._form.is_chat:
            return self._form.choice(self._index, {"text": self._text}, self._tokens, self._reason)
        message: dict[str, Any] = {"role": "assistant", "content": self._text, "refusal": None}
        if self._calls is not None and self._calls.calls:
            message |= {"content": self._text.strip() or None, "tool_calls": self._calls.calls}
        if self._thought:
            message["reasoning_content"] = self._thought
        return self._form.choice(self._index, {"message": message}, self._tokens, self._reason)


def _choices(answer: Answer, form: Form) -> list[Choice]:
    calls = [each.settings.calls for each in answer.sequences]
    return [Choice(index, form, each and CallDeltas(each)) for index, each in enumerate(calls)]


def _usage(answer: Answer, choices: int) -> dict[str, Any]:
    """Return the tokens of a request; a prompt counts once, however many choices it has."""
    meters: list[Meter] = [each.meter for each in answer.sequences]
    prompts, new = sum(meter.prompt_tokens for meter in meters[::choices]), sum(meter.new_tokens for meter in meters)
    cached = sum(min(meter.cached_tokens, meter.prompt_tokens) for meter in meters[::choices])
    counts = {"prompt_tokens": prompts, "completion_tokens": new, "total_tokens": prompts + new}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}


async def whole(answer: Answer, form: Form, choices: int) -> dict[str, Any]:
    """Return the response when all sequences have ended. Raises their errors."""
    found = _choices(answer, form)
    async for index, event in answer.events():
        for _ in found[index].parts(event):
            pass
    return form.response([each.whole() for each in found], usage=_usage(answer, choices))


async def streamed(
    answer: Answer, form: Form, choices: int, with_usage: bool, report: Callable[[Exception], None]
) -> AsyncIterator[str]:
    """Yield the server-sent events of a response. An error is the last one, as an error object.

    `report` is called with an error that the client is not told.
    Comments tell how much of the prompt has been read: they keep connections alive, and clients ignore them.
    """
    found, more = _choices(answer, form), {"usage": None} if with_usage else {}

    def chunk(part: dict[str, Any]) -> str:
        return event_text(form.response([part], chunk=True, **more))

    for choice in found if form.is_chat else []:
        yield chunk(choice.begin())
    try:
        async for index, event in answer.events():
            if isinstance(event, Prefilled | DraftPrefilled):
                yield f": prefill {index} {event.done} {event.total}\n\n"
            for part in found[index].parts(event):
                yield chunk(part)
        if with_usage:
            yield event_text(form.response([], chunk=True, usage=_usage(answer, choices)))
    except Exception as error:
        if not isinstance(error, ApiError):
            report(error)
        yield event_text(api_error(error).body())
        return
    yield "data: [DONE]\n\n"


def chat_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice: tokens with theirs, and the likeliest at their places."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(token)
        return {"token": token_text(data), "logprob": _finite(logprob), "bytes": list(data)}

    content = [
        entry(each.id, each.logprobs.logprob) | {"top_logprobs": [entry(*row) for row in each.logprobs.top]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the `logprobs` of a completion's choice, as lists. The likeliest at a place have the token's own beside.

    Of tokens that are spelt alike, the likeliest one is there.
    """

    def spelt(token: int) -> str:
        return token_text(token_bytes(token), "bytes:")

    def likeliest(each: ScoredToken) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, logprob in (*each.logprobs.top, (each.id, each.logprobs.logprob)):
            found.setdefault(spelt(token), _finite(logprob))
        return found

    return {
        "text_offset": [each.offset for each in tokens],
        "token_logprobs": [_finite(each.logprobs.logprob) for each in tokens],
        "tokens": [spelt(each.id) for each in tokens],
        "top_logprobs": [likeliest(each) for each in tokens],
    }


def token_text(data: bytes, prefix: str = "") -> str:
    r"""Return a token as text; one that is only a part of a character as `\xe2\x82`, after the prefix."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
