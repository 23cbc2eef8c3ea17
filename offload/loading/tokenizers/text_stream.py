"""Turns tokens into text as it becomes final, and ends it at stop strings. The engine below knows tokens alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

from ...events import Event, Finished, Logprobs, ScoredToken, Text, Thought, Tokens
from .thinking import Thinking, overlap
from .tokenizer import Tokenizer
from .tool_calls import ToolFormat

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_LONGEST_WINDOW = 64  # tokens
_LONGEST_CHARACTER = 4  # bytes in UTF-8, so at most as many tokens


class StreamDecoder:
    """Decodes tokens one by one, in constant time a token, and emits whole characters only.

    A tail that decodes to U+FFFD may be the beginning of a character. It is held back for at most as many tokens as a
    character has bytes. Tokens are decoded together with a few earlier ones, because some tokenizers treat the first
    word of a text differently.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the window: context tokens, then those not completely emitted
        self._context = 0  # number of context tokens in the window
        self._sent = 0  # characters of the window's text that have been emitted
        self._broken = 0  # tokens at the end that do not form a whole character yet

    def feed(self, token: int) -> str:
        """Return the text that became final with this token; often "", never a part of a character."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.endswith(_INCOMPLETE):
            self._broken = 0
            return self._emit(text, settled=True)
        self._broken += 1
        if self._broken < _LONGEST_CHARACTER:
            return ""
        return self._emit(text[:-1], settled=False)  # broken bytes; only the last may still grow into a character

    def flush(self) -> str:
        """Return the remaining text at the end, complete or not."""
        return self._emit(self._decode(self._ids), settled=True) if self._ids else ""

    def _emit(self, text: str, settled: bool) -> str:
        """Return the part of the window's text that was not emitted yet, and shorten the window."""
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        if settled and piece:
            self._ids = self._ids[self._context :]
            self._context, self._sent = len(self._ids), len(self._decode(self._ids))
        elif len(self._ids) > _LONGEST_WINDOW:  # a long run of special tokens or broken bytes
            # UTF-8 resynchronises within one character, so both windows end in the same text, sent and unsent.
            unsent = len(text) + (not settled) - self._sent
            self._ids, self._context = self._ids[-_LONGEST_WINDOW // 2 :], 0
            self._sent = len(self._decode(self._ids)) - unsent
        return piece


class StopStrings:
    """Searches streamed text for stop strings. The stop string that is complete first ends it and is not emitted."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to emit, and whether a stop string was found; after that, feed no more."""
        self._pending += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if found:  # the earliest end wins, then the earliest start: independent of how the text was cut into pieces
            safe, self._pending = self._pending[: min(found)[1]], ""
            return safe, True
        hold = max((overlap(self._pending, stop) for stop in self._stops), default=0)
        cut = len(self._pending) - hold
        safe, self._pending = self._pending[:cut], self._pending[cut:]
        return safe, False

    def flush(self) -> str:
        """Return the pending text at the end; it turned out not to be a stop string."""
        pending, self._pending = self._pending, ""
        return pending


class ScoredText:
    """Holds tokens with log-probabilities back until their text has been emitted, which may wait for a stop string.

    Characters are counted as they become the answer's: those of a character's first tokens belong to its last one.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[ScoredToken, int]] = deque()  # each with where its text ends, in order
        self._known = self._emitted = 0  # characters of the answer: decoded, and let through

    def feed(self, token: int | None, logprobs: Logprobs, known: int, emitted: int) -> None:
        """Add a token, with which `known` characters of the answer became known, and `emitted` were let through.

        None is a token of the thinking: tokens that wait without any text before it are no part of the answer either.
        """
        begin = self._known
        self._known, self._emitted = self._known + known, self._emitted + emitted
        if token is None:
            self._waiting = deque((scored, end) for scored, end in self._waiting if scored.offset < end)
        else:
            self._waiting.append((ScoredToken(token, begin, logprobs), self._known))

    def emitted(self) -> tuple[ScoredToken, ...]:
        """Return, once, the tokens whose text has been emitted."""
        count = 0
        for scored, end in self._waiting:
            if scored.offset >= self._emitted or end > self._emitted:
                break
            count += 1
        return self._take(count)

    def cut(self, further: int = 0) -> tuple[ScoredToken, ...]:
        """Return the tokens of which a part has been emitted, with `further` characters; the text ends there."""
        self._emitted += further
        found = self._take(sum(scored.offset < self._emitted for scored, _ in self._waiting))
        self._waiting.clear()
        return found

    def flush(self) -> tuple[ScoredToken, ...]:
        """Return the tokens that wait at the end of the text."""
        return self._take(len(self._waiting))

    def _take(self, count: int) -> tuple[ScoredToken, ...]:
        return tuple(self._waiting.popleft()[0] for _ in range(count))


class TextPieces(NamedTuple):
    """The thinking and the text of the answer that became final, and whether a stop string was met.

    `thought_tokens` were generated while the model thought; `tokens` are those of the text, as in Text.
    """

    thought: str
    text: str
    met: bool
    thought_tokens: int = 0
    tokens: tuple[ScoredToken, ...] = ()

    def events(self) -> Iterator[Event]:
        if self.thought or self.thought_tokens:
            yield Thought(self.thought, self.thought_tokens)
        if self.text or self.tokens:
            yield Text(self.text, self.tokens)


class TextLayer:
    """Turns tokens into text: the answer up to a stop string, and apart from it what the model thinks before."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str], thinking: Thinking | None) -> None:
        """Without `thinking`, all text is the answer."""
        self._decoder, self._stops = StreamDecoder(decode), StopStrings(stops)
        self._thinking = thinking
        self._scored = ScoredText()

    @classmethod
    def after(
        cls,
        tokenizer: Tokenizer,
        ids: Sequence[int],
        stops: Sequence[str],
        is_chat: bool,
        calls: ToolFormat | None = None,
    ) -> TextLayer:
        """Return the layer for the text behind a prompt; one in the chat template may be followed by thinking.

        The special tokens of `calls` of tools are in the text.
        """
        thinking = tokenizer.thinking(ids) if is_chat else None
        spelling = "" if calls is None else calls.begin + calls.middle + calls.end
        spelling += "" if thinking is None else "".join(thinking.form.marks)
        marks = [name for name in tokenizer.special_ids if name in spelling] if spelling else []
        return cls(tokenizer.decoder(marks), stops, thinking)

    def feed(self, ids: Sequence[int], logprobs: Sequence[Logprobs] = ()) -> tuple[int, TextPieces]:
        """Return the number of tokens up to a stop string in the answer, and what became final with them.

        `logprobs` are those of the tokens, or empty.
        """
        thought = text = ""
        thought_tokens = 0
        for used, token in enumerate(ids, 1):
            was_open = self._is_open
            more, answer = self._split(self._decoder.feed(token))
            safe, met = self._stops.feed(answer)
            is_thought = was_open or self._is_open
            thought_tokens += is_thought
            thought, text = thought + more, text + safe
            if logprobs:
                self._scored.feed(None if is_thought else token, logprobs[used - 1], len(answer), len(safe))
            if met:
                return used, TextPieces(thought, text, True, thought_tokens, self._scored.cut())
        return len(ids), TextPieces(thought, text, False, thought_tokens, self._scored.emitted())

    def flush(self) -> TextPieces:
        """Return the pending pieces when no more tokens come."""
        thought, answer = self._split(self._decoder.flush())
        if self._thinking is not None:
            more, end = self._thinking.flush()
            thought, answer = thought + more, answer + end
        text, met = self._stops.feed(answer)
        if met:
            return TextPieces(thought, text, True, tokens=self._scored.cut(len(text)))
        return TextPieces(thought, text + self._stops.flush(), False, tokens=self._scored.flush())

    @property
    def _is_open(self) -> bool:
        return self._thinking is not None and self._thinking.is_open

    def _split(self, text: str) -> tuple[str, str]:
        """Return the thinking and the answer of a piece of text."""
        return ("", text) if self._thinking is None else self._thinking.feed(text)


def stream_text(events: Generator[Event, int | None], layer: TextLayer) -> Generator[Event, int | None]:
    """Yield the engine's events, and Thought and Text in between, up to a stop string in the answer.

    A run of tokens is cut after the one that completes a stop string, and the number of kept tokens is sent to the
    engine. Always closes the engine's generator.
    """
    kept = 0
    with closing(events):
        for event in events:
            if isinstance(event, Finished):
                pieces = layer.flush()
                yield from pieces.events()
                yield Finished("stop") if pieces.met else event
                return
            if not isinstance(event, Tokens):
                yield event
                continue
            used, pieces = layer.feed(event.ids, event.logprobs)
            kept += used
            yield event if used == len(event.ids) else Tokens(event.ids[:used], event.logprobs[:used])
            yield from pieces.events()
            if pieces.met:
                yield events.send(kept)
                return
