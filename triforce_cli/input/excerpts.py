"""Cuts a document by its tokens: a range that the user asks for, and parts that fit a context.

Both are cut at the ends of tokens, in the text itself: nothing is encoded and decoded again.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.errors import SettingsError
from offload.units import counted, parse_tokens

Spans = Sequence[tuple[int, int]]  # of each token, where it begins and ends in the text, in characters

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
# Where a text is best cut, best first; a cut comes behind the match.
_BORDERS = (
    re.compile(r"\n[ \t]*\n\s*"),
    re.compile(r"\n"),
    re.compile(r"[.!?…。！？][\"'”’)\]]*\s*"),
    re.compile(r"\s+"),
)


@dataclass(frozen=True, slots=True)
class Position:
    """A position in a document: a number of its tokens, or a fraction of them."""

    tokens: int | None = None
    fraction: float | None = None

    def of(self, total: int) -> int:
        """Return the number of tokens before the position, in a document of `total`."""
        return self.tokens if self.fraction is None else round(self.fraction * total)

    def __str__(self) -> str:
        return f"{self.tokens:,}" if self.fraction is None else f"{100 * self.fraction:g}%"


def parse_position(text: str) -> Position:
    """Return the position that "10%", "2000" or "2K" stands for. Raises SettingsError."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        return Position(tokens=0 if text.strip() == "0" else parse_tokens(text))
    percent = float(match[1])
    if percent > 100:
        raise SettingsError(f"{text.strip()} is more than the whole document", "use 0% to 100%")
    return Position(fraction=percent / 100)


@dataclass(frozen=True, slots=True)
class Range:
    """From one position of a document to another; all of it by default."""

    start: Position | None = None
    end: Position | None = None

    def cut(self, text: str, spans: Callable[[str], Spans], name: str) -> tuple[str, str]:
        """Return the text between, and a note that says which tokens it is; "" if it is all.

        Raises SettingsError if there is no text between.
        """
        if self.start is None and self.end is None:
            return text, ""
        found = spans(text)
        total = len(found)
        start = self.start.of(total) if self.start else 0
        end = min(self.end.of(total), total) if self.end else total
        piece = _between(text, found, start, end) if start < end else ""
        if not piece.strip():
            asked = " ".join(f"--{n} {p}" for n, p in (("from", self.start), ("to", self.end)) if p is not None)
            raise SettingsError(
                f"{asked} selects no text of {name}, which has {counted(total, 'token')}",
                "give a --to behind --from, and a --from before the end, in tokens or percent",
            )
        return piece, f"{name}: tokens {start:,} to {end:,} of {total:,}"


def split(text: str, spans: Spans, room: int, overlap: int) -> list[str]:
    """Return parts of up to `room` tokens that make up the text; each overlaps the last by up to `overlap` tokens.

    Cut between paragraphs if the second half of the room has such a border, else between lines, sentences or words.
    """
    assert 0 <= 2 * overlap < room
    parts, cut, start = [], 0, 0  # where the next part begins: in the text, and the first token that is in it
    while len(spans) - start > room:
        border = _border(text, spans[start + room // 2][0], spans[start + room - 1][1])
        parts.append(text[cut:border])
        cut, following = border, _token_at(spans, border)
        if overlap:
            earliest = max(following - overlap, start + 1)
            before = len(text[:border].rstrip())  # otherwise the border itself would be found again
            cut = _border(text, spans[earliest][0], before, last=False)
            following = _token_at(spans, cut)
        start = following
    if parts and not text[cut:].strip():
        parts[-1] += text[cut:]  # no part of its own for what the tokenizer leaves out
    else:
        parts.append(text[cut:])
    return parts


def _token_at(spans: Spans, character: int) -> int:
    """Return the first token that ends behind a character: a border may go through a token."""
    return bisect_right(spans, character, key=lambda span: span[1])


def _border(text: str, low: int, high: int, last: bool = True) -> int:
    """Return the last border between two characters, or the first; without any, `high`, or `low`."""
    for pattern in _BORDERS:
        found = [match.end() for match in pattern.finditer(text, low, high)]
        if found:
            return found[-1] if last else found[0]
    return high if last else low


def _between(text: str, spans: Spans, start: int, end: int) -> str:
    """Return the text of tokens `start` to `end - 1`, with what the tokenizer left out between them."""
    return text[spans[start][0] if start else 0 : len(text) if end == len(spans) else spans[end][0]]
