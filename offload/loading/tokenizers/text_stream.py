"""Turns tokens into text as it becomes final, and ends it at stop strings. The engine below knows tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

from ...events import Event, Finished, Logprobs, ScoredToken, Text, Thought, Tokens
from .scored_text import ScoredText
from .thinking import Harmony, Thinking, overlap
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
        elif len(self._ids) > _LONGEST_WINDOW:  # a long run of special tokens or broken bytes
            # UTF-8 resynchronises within one character, so both windows end in the same text, sent and unsent.
            unsent = len(text) + (not settled) - self._sent
            self._ids, self._context = self._ids[-_LONGEST_WINDOW // 2 :], 0
            self._sent = len(self._decode(self._ids)) - unsent
            return piece
        else:
            return piece
        self._context = len(self._ids)
        self._sent = len(self._decode(self._ids))
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


class TextPieces(NamedTuple):
    """What became final: thinking, the answer's text, and whether that met a stop string.

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

    def __init__(
        self, decode: Callable[[list[int]], str], stops: Sequence[str], thinking: Thinking | Harmony | None
    ) -> None:
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
        """Return the layer for what follows a prompt; one in the chat template may be followed by thinking.

        The special tokens of `calls` of tools are in the text.
        """
        thinking = tokenizer.thinking(ids) if is_chat else None
        spelling = "" if calls is None else calls.begin + calls.middle + calls.end
        spelling += "" if thinking is None else "".join(thinking.marks)
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
            more, answer, safe, met = self._let_through(self._decoder.feed(token))
            is_thought = was_open or self._is_open
            thought_tokens += is_thought
            thought, text = thought + more, text + safe
            if logprobs:
                self._score(None if is_thought else token, logprobs[used - 1], len(answer), len(safe))
            if met:
                return used, TextPieces(thought, text, True, thought_tokens, self._scored.cut())
        return len(ids), TextPieces(thought, text, False, thought_tokens, self._scored.emitted())

    def _score(self, token: int | None, logprobs: Logprobs, known: int, emitted: int) -> None:
        """Note a token of the answer, or of the thinking, None, with the characters of the answer that came with it."""
        if token is not None:
            self._scored.feed(token, logprobs, known, emitted)
            return
        self._scored.advance(known, emitted)
        self._scored.drop_silent()

    def flush(self) -> TextPieces:
        """Return what is pending when no more tokens come."""
        thought, _, text, met = self._let_through(self._decoder.flush())
        if self._thinking is not None:
            more, rest = self._thinking.flush()
            thought += more
            if not met:
                safe, met = self._stops.feed(rest)
                text += safe
        if met:
            self._scored.advance(0, len(text))
            return TextPieces(thought, text, True, tokens=self._scored.cut())
        return TextPieces(thought, text + self._stops.flush(), False, tokens=self._scored.rest())

    @property
    def _is_open(self) -> bool:
        return self._thinking is not None and self._thinking.is_open

    def _let_through(self, text: str) -> tuple[str, str, str, bool]:
        """Return the thinking and the answer of a piece of text, what of the answer is safe, and whether it stops."""
        thought = ""
        if self._thinking is not None:
            thought, text = self._thinking.feed(text)
        return (thought, text, *self._stops.feed(text))


def stream_text(events: Generator[Event, int | None], layer: TextLayer) -> Generator[Event, int | None]:
    """Yield the engine's events, and Thought and Text in between, up to a stop string in the answer.

    A run of tokens is cut after the one that completes a stop string, and the number of kept tokens is sent to the
    engine. Always closes the engine's generator.
    """
    kept = 0
    with closing(events):
        for event in events:
            if isinstance(event, Finished):
                held = layer.flush()
                yield from held.events()
                yield Finished("stop") if held.met else event
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
