"""Answers of the OpenAI API: the events of a request's sequences -> a response object, or server-sent events."""

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from offload.events import DraftPrefilled, Event, Finished, Prefilled, ScoredToken, Text, Thought
from offload.units import counted

from ..output.format import duration
from .errors import ApiError, api_error
from .sequences import SequenceSettings, ServedModel, ServedSequence
from .tools import AnsweredCalls

_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
_LEAST = -9999.0  # for a probability of 0: JSON has no infinity
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # in texts; JSON escapes the others
TokenBytes = Callable[[int], bytes]


class Answer:
    """The answer to one request: of each prompt `choices`, each a sequence. It is made and read in the event loop."""

    def __init__(self, model: ServedModel, settings: Sequence[SequenceSettings], choices: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()
        self.sequences = [
            ServedSequence(own, model.tokenizer, partial(self._post, index)) for index, own in enumerate(settings)
        ]
        self._choices = [Choice(index, own, model.tokenizer.token_bytes) for index, own in enumerate(settings)]
        self._is_chat, self._choices_a_prompt = settings[0].is_chat, choices
        self._head = {
            "id": ("chatcmpl-" if self._is_chat else "cmpl-") + secrets.token_hex(12),
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }

    def _post(self, index: int, event: Event | Exception) -> None:
        """Take an event from the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))

    async def _events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield the events of all sequences, each with its number, until all have finished. Raises their errors."""
        left = len(self.sequences)
        while left:
            index, event = await self._queue.get()
            if isinstance(event, Exception):
                raise event
            left -= isinstance(event, Finished)
            yield index, event

    async def whole(self) -> dict[str, Any]:
        """Return the response when all sequences have ended. Raises their errors."""
        async for index, event in self._events():
            for _ in self._choices[index].parts(event):
                pass
        return self._head | {"choices": [choice.whole() for choice in self._choices], "usage": self._usage()}

    async def streamed(
        self, with_usage: bool, report: Callable[[Exception], None], counts_always: bool = False
    ) -> AsyncIterator[str]:
        """Yield the server-sent events of a response. An error is the last one, as an error object.

        `counts_always`: each chunk has the tokens so far. `report` is called with an error that the client is not told.
        Comments tell how much of the prompt has been read: they keep connections alive, and clients ignore them.
        """
        head = self._head | ({"object": "chat.completion.chunk"} if self._is_chat else {})
        more: dict[str, Any] = {"usage": None} if with_usage else {}
        for choice in self._choices if self._is_chat else []:
            yield event_text(**head, choices=[choice.begin()], **more)
        try:
            async for index, event in self._events():
                if isinstance(event, Prefilled | DraftPrefilled):
                    yield f": prefill {index} {event.done} {event.total}\n\n"
                for part in self._choices[index].parts(event):
                    more |= {"usage": self._usage()} if counts_always else {}
                    yield event_text(**head, choices=[part], **more)
            if with_usage:
                yield event_text(**head, choices=[], usage=self._usage())
        except Exception as error:
            if not isinstance(error, ApiError):
                report(error)
            yield event_text(**api_error(error).body())
            return
        yield "data: [DONE]\n\n"

    def facts(self) -> str:
        """Return in words how many tokens were read and written, and when the first one came."""
        usage = self._usage()
        firsts = [sequence.meter.summary("interrupted").ttft_s for sequence in self.sequences]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        read, written = counted(usage["prompt_tokens"], "token"), f"{usage['completion_tokens']:,}"
        known = [first for first in firsts if first is not None]
        first = f", the first after {duration(min(known))}" if known else ""
        return f"{read} read ({cached:,} cached), {written} written{first}"

    def _usage(self) -> dict[str, Any]:
        """Return the tokens of the request; a prompt counts once, however many choices it has."""
        meters = [sequence.meter for sequence in self.sequences]
        firsts = meters[:: self._choices_a_prompt]
        read, new = sum(meter.prompt_tokens for meter in firsts), sum(meter.new_tokens for meter in meters)
        cached = sum(min(meter.cached_tokens, meter.prompt_tokens) for meter in firsts)
        counts = {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}
        return counts | {"prompt_tokens_details": {"cached_tokens": cached}}


class Choice:
    """One choice of an answer, as its events come: parts of it, and at the end the whole."""

    def __init__(self, index: int, settings: SequenceSettings, token_bytes: TokenBytes) -> None:
        self._index, self._is_chat = index, settings.is_chat
        self._calls = None if settings.calls is None else AnsweredCalls(settings.calls)
        self._token_bytes = None if settings.logprobs is None else token_bytes
        self._text, self._thought, self._tokens, self._reason = "", "", list[ScoredToken](), "length"

    def begin(self) -> dict[str, Any]:
        """Return the first part of a chat's choice."""
        return self._part({"role": "assistant", "content": ""})

    def parts(self, event: Event) -> Iterator[dict[str, Any]]:
        """Yield what an event adds, as choices of chunks: one call in each."""
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
            is_call = self._calls is not None and bool(self._calls.calls)
            self._reason = "tool_calls" if is_call and event.reason != "length" else _REASONS[event.reason]
            yield self._part({}, reason=self._reason)

    def _texts(self, text: str, tokens: Sequence[ScoredToken] = ()) -> Iterator[dict[str, Any]]:
        self._text += text
        self._tokens += tokens
        if text or tokens:
            yield self._part({"content": text}, tokens)

    def _part(
        self, delta: dict[str, Any], tokens: Sequence[ScoredToken] = (), reason: str | None = None
    ) -> dict[str, Any]:
        content = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return self._choice(content, self._logprobs(tokens) if tokens else None, reason)

    def whole(self) -> dict[str, Any]:
        """Return the whole choice: of a reasoning model, with what it has thought apart from the answer, as in vLLM."""
        content: dict[str, Any] = {"text": self._text}
        if self._is_chat:
            content = {"message": {"role": "assistant", "content": self._text, "refusal": None}}
            if self._calls is not None and self._calls.calls:
                content["message"] |= {"content": self._text.strip() or None, "tool_calls": self._calls.calls}
            if self._thought:
                content["message"]["reasoning_content"] = self._thought
        return self._choice(content, self._logprobs(self._tokens), self._reason)

    def _choice(self, content: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": self._index} | content | {"logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if self._token_bytes is None:
            return None
        return (chat_logprobs if self._is_chat else completion_logprobs)(tokens, self._token_bytes)


def event_text(**fields: Any) -> str:
    """Return a server-sent event with an object of the API, on one line for clients that end lines as Unicode does."""
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text.translate(_LINE_ENDS)}\n\n"


def chat_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice: tokens with theirs, and the likeliest at their places."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(token)
        return {"token": token_text(data), "logprob": _finite(logprob), "bytes": list(data)}

    content = [
        entry(token.id, token.logprobs.logprob) | {"top_logprobs": [entry(*row) for row in token.logprobs.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the `logprobs` of a completion's choice, as lists. The likeliest at a place have the token's own beside.

    Of tokens that are spelt alike, the likeliest one is there.
    """

    def spelt(token: int) -> str:
        return token_text(token_bytes(token), "bytes:")

    def likeliest(token: ScoredToken) -> dict[str, float]:
        values: dict[str, float] = {}
        for id, logprob in (*token.logprobs.top, (token.id, token.logprobs.logprob)):
            values.setdefault(spelt(id), _finite(logprob))
        return values

    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [_finite(token.logprobs.logprob) for token in tokens],
        "tokens": [spelt(token.id) for token in tokens],
        "top_logprobs": [likeliest(token) for token in tokens],
    }


def token_text(data: bytes, prefix: str = "") -> str:
    r"""Return a token as text; one that is only a part of a character as `\xe2\x82`, after the prefix."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
