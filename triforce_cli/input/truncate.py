"""Truncates a document to what fits the context: at ends of tokens and between words, in the text itself."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.errors import PromptError

from .excerpts import Spans

START, MIDDLE, END = "start", "middle", "end"
PARTS = (START, MIDDLE, END)  # of a document that can be left out
GAP = "\n\n[...]\n\n"  # stands in the prompt where the middle is left out
_KEPT = {START: "the end", MIDDLE: "the start and the end", END: "the start"}
_WORD = 40  # characters in which a border between words is looked for
_SPACE = re.compile(r"\s+")
_TRIES = 12


@dataclass(frozen=True, slots=True)
class Truncated:
    """A document of which a part, one of PARTS, was left out: what is left of it, in tokens of the document alone."""

    name: str
    text: str
    dropped: str
    kept_tokens: int
    total_tokens: int

    @property
    def kept(self) -> str:
        """What was kept, for people: `7,668 of 100,647 tokens, the end`."""
        return f"{self.kept_tokens:,} of {self.total_tokens:,} tokens, {_KEPT[self.dropped]}"

    @property
    def fields(self) -> dict[str, str | int]:
        """Return what the JSON event says."""
        counts = {"kept_tokens": self.kept_tokens, "dropped_tokens": self.total_tokens - self.kept_tokens}
        return {"document": self.name, "dropped": self.dropped, **counts, "total_tokens": self.total_tokens}


def truncate(
    name: str, text: str, spans: Spans, dropped: str, room: int, encode: Callable[[str], Sequence[int]]
) -> tuple[Truncated, list[int]]:
    """Return as much of a document as makes a prompt of up to `room` tokens, and that prompt's tokens.

    Args:
        spans: of the document's tokens, in characters.
        dropped: the part that is left out, one of PARTS.
        encode: returns the tokens of the whole prompt with a text in the place of the document.

    Raises PromptError if what stands around the document leaves no room for it.
    """
    around = len(encode("x"))
    kept = min(room - around, len(spans) - 1)
    for _ in range(_TRIES):
        if kept < 1:
            break
        piece, tokens = _without(text, spans, dropped, kept)
        ids = list(encode(piece))
        if len(ids) <= room:
            return Truncated(name, piece, dropped, tokens, len(spans)), ids
        kept -= len(ids) - room  # cut apart, a text may have a few more tokens
    raise PromptError(
        f"what stands around {name} takes {around:,} tokens of the {room:,} that the prompt may have: no room is left",
        "use a shorter question, or fewer --max-new-tokens",
    )


def _without(text: str, spans: Spans, dropped: str, kept: int) -> tuple[str, int]:
    """Return the text without a part, and how many of its tokens are in it: up to `kept`."""
    first = {START: 0, MIDDLE: kept // 2, END: kept}[dropped]
    head = _end_of_word(text, spans[first][0]) if first else 0
    tail = _start_of_word(text, spans[len(spans) - (kept - first)][0]) if first < kept else len(text)
    tokens = bisect_right(spans, head, key=lambda span: span[1]) if head else 0
    tokens += len(spans) - bisect_left(spans, tail, key=lambda span: span[0]) if tail < len(text) else 0
    return (GAP if head and tail < len(text) else "").join((text[:head], text[tail:])), tokens


def _start_of_word(text: str, position: int) -> int:
    """Return where the next word begins; the position itself where none does soon."""
    match = _SPACE.search(text, position, position + _WORD)
    return match.end() if match and match.end() < len(text) else position


def _end_of_word(text: str, position: int) -> int:
    """Return where the last whole word ends; the position itself where none does soon."""
    found = list(_SPACE.finditer(text, max(position - _WORD, 0), position))
    return found[-1].start() if found and found[-1].start() > 0 else position
