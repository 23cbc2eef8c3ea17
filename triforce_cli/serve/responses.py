"""Answers of the OpenAI API: events -> response objects and log-probabilities, whole or as server-sent events."""

import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.events import DraftPrefilled, Event, Finished, Prefilled, ScoredToken, Text, Thought
from offload.level_metrics import acceptance, tokens_per_verification
from offload.metrics import Meter

from .api_errors import ApiError, api_error, event_text
from .sequences import Answer, ServedSequence
from .tools import CallDeltas, are_whole, whole_message

_CALLED = "tool_calls"
_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
_THOUGHT = "reasoning_content"
_DONE = "data: [DONE]\n\n"
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

    def choice(self, sequence: ServedSequence, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """Return a whole choice: of a reasoning model, with what it has thought apart from the answer, as in vLLM.

        `tokens` are those of the answer, if their log-probabilities are wanted.
        """
        meter = sequence.meter
        content: dict[str, Any] = {"text": meter.text}
        reason = _REASONS[meter.finish_reason or "length"]
        if self.is_chat:
            thought = {_THOUGHT: "".join(meter.thoughts)} if meter.thoughts else {}
            form = sequence.settings.calls
            message = {"content": meter.text} if form is None else whole_message(meter.text, form)
            content = {"message": {"role": "assistant", "refusal": None} | message | thought}
            reason = _CALLED if reason == "stop" and are_whole(message.get("tool_calls", ())) else reason
        end = {"logprobs": self.logprobs(tokens), "finish_reason": reason}
        return {"index": sequence.index} | content | end

    def logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens, None if they are not wanted."""
        if self.token_bytes is None:
            return None
        return (chat_logprobs if self.is_chat else completion_logprobs)(tokens, self.token_bytes)

    def delta(
        self, index: int, text: str = "", tokens: Sequence[ScoredToken] = (), reason: str | None = None, **more: Any
    ) -> dict[str, Any]:
        """Return a part of a choice: some text with its tokens, or the reason that it has ended; `more` of a chat's."""
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            content = {"delta": more | ({"content": text} if text or tokens or "role" in more else {})}
        end = {"logprobs": self.logprobs(tokens) if tokens else None, "finish_reason": reason}
        return {"index": index} | content | end


def usage(meters: Sequence[Meter], choices: int) -> dict[str, Any]:
    """Return the tokens of a request; a prompt counts once, however many choices it has."""
    prompts, new = sum(meter.prompt_tokens for meter in meters[::choices]), sum(meter.new_tokens for meter in meters)
    cached = sum(min(meter.cached_tokens, meter.prompt_tokens) for meter in meters[::choices])
    counts = {"prompt_tokens": prompts, "completion_tokens": new, "total_tokens": prompts + new}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}


def statistics(meter: Meter) -> dict[str, Any]:
    """Return how a sequence has been decoded so far: acceptance rates by "drafter -> verifier", tokens a second."""
    return {
        "acceptance": acceptance(meter.levels),
        "tokens_per_verification": tokens_per_verification(meter.levels),
        "tokens_per_s": meter.tokens_per_s,
        "new_tokens": meter.new_tokens,
    }


async def whole(answer: Answer, form: Form, choices: int) -> dict[str, Any]:
    """Return the response when all sequences have ended. Raises their errors."""
    tokens: list[list[ScoredToken]] = [[] for _ in answer.sequences]
    async for index, event in answer.events():
        if isinstance(event, Text):
            tokens[index] += event.tokens
    meters = [sequence.meter for sequence in answer.sequences]
    found = [form.choice(*each) for each in zip(answer.sequences, tokens, strict=True)]
    return form.response(found, usage=usage(meters, choices), statistics=[statistics(meter) for meter in meters])


async def streamed(
    answer: Answer,
    form: Form,
    choices: int,
    with_usage: bool,
    with_statistics: bool,
    report: Callable[[Exception], None],
) -> AsyncIterator[str]:
    """Yield the server-sent events of a response. An error is the last one, as an error object.

    `report` is called with an error that the client is not told.

    Comments tell how much of the prompt has been read: they keep connections alive, and clients ignore them.
    """

    def chunk(index: int, **delta: Any) -> str:
        beside = {"statistics": statistics(answer.sequences[index].meter)} if with_statistics else {}
        return event_text(form.response([form.delta(index, **delta)], chunk=True, **beside))

    forms = [each.settings.calls for each in answer.sequences]
    calls = [None if form is None else CallDeltas(form) for form in forms]
    if form.is_chat:
        for index in range(len(answer.sequences)):
            yield chunk(index, role="assistant")
    try:
        async for index, event in answer.events():
            if isinstance(event, Prefilled | DraftPrefilled):
                yield f": prefill {index} {event.done} {event.total}\n\n"
            for delta in _deltas(event, calls[index]):
                yield chunk(index, **delta)
    except Exception as error:
        if not isinstance(error, ApiError):
            report(error)
        yield event_text(api_error(error).body())
        return
    if with_usage:
        yield event_text(form.response([], chunk=True, usage=usage([each.meter for each in answer.sequences], choices)))
    yield _DONE


def _deltas(event: Event, calls: CallDeltas | None) -> Iterator[dict[str, Any]]:
    """Yield the arguments of `Form.delta` for each part of a choice in an event; `calls` reads calls of tools."""
    if isinstance(event, Thought) and event.text:
        yield {_THOUGHT: event.text}
    elif isinstance(event, Text) and calls is not None:
        text, found = calls.feed(event.text)
        if text or found:
            yield {"text": text} | ({"tool_calls": found} if found else {})
    elif isinstance(event, Text):
        yield {"text": event.text, "tokens": event.tokens}
    elif isinstance(event, Finished):
        if calls is not None and (rest := calls.flush()):
            yield {"text": rest}
        reason = _REASONS[event.reason]
        called = calls is not None and reason == "stop" and are_whole(calls.calls)
        yield {"reason": _CALLED if called else reason}


LEAST = -9999.0  # for a probability of 0: JSON has no infinity
_NOT_TEXT = "bytes:"  # before the bytes of a token that is no text, in a completion


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
        return token_text(token_bytes(token), _NOT_TEXT)

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
    return logprob if math.isfinite(logprob) else LEAST
