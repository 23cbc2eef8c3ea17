"""Pieces of a document by its tokens: a range that the user asks for, and parts that fit a context.

Both are cut from the text where tokens end, so nothing is changed on the way through the tokens.
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
class Place:
    """A place in a document: a number of its tokens, or a fraction of them."""

    tokens: int | None = None
    fraction: float | None = None

    def of(self, total: int) -> int:
        """In tokens from the beginning of a document of `total`."""
        return self.tokens if self.fraction is None else round(self.fraction * total)

    def __str__(self) -> str:
        return f"{self.tokens:,}" if self.fraction is None else f"{100 * self.fraction:g}%"


def parse_place(text: str) -> Place:
    """ "10%", "2000" or "2K". Raises SettingsError."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        return Place(tokens=0 if text.strip() == "0" else parse_tokens(text))
    percent = float(match[1])
    if percent > 100:
        raise SettingsError(f"{text.strip()} is more than all of the document", "use 0% to 100%")
    return Place(fraction=percent / 100)


@dataclass(frozen=True, slots=True)
class Range:
    """From one place of a document to another; all of it by default."""

    start: Place | None = None
    end: Place | None = None

    def cut(self, text: str, spans: Callable[[str], Spans], name: str) -> tuple[str, str]:
        """The text between, and what that is in words; "" if it is all. Raises SettingsError if there is nothing."""
        if self.start is None and self.end is None:
            return text, ""
        places = spans(text)
        total = len(places)
        start = self.start.of(total) if self.start else 0
        end = min(self.end.of(total), total) if self.end else total
        found = _between(text, places, start, end) if start < end else ""
        if not found.strip():
            asked = " ".join(f"--{n} {p}" for n, p in (("from", self.start), ("to", self.end)) if p is not None)
            raise SettingsError(
                f"there is nothing in {asked} of {name}, which has {counted(total, 'token')}",
                "use a --to behind --from and a --from before the end, in tokens or percent",
            )
        return found, f"{name}: tokens {start:,} to {end:,} of {total:,}"


def split(text: str, spans: Spans, room: int, overlap: int) -> list[str]:
    """Parts of up to `room` tokens that together are the text; each begins up to `overlap` tokens before the last end.

    Cut between paragraphs if the second half of the room has such a border, else between lines, sentences or words.
    """
    assert 0 <= 2 * overlap < room
    parts, place, start = [], 0, 0  # where the next part begins: in the text, and the first token that is in it
    while len(spans) - start > room:
        border = _border(text, spans[start + room // 2][0], spans[start + room - 1][1])
        parts.append(text[place:border])
        place, following = border, _token_at(spans, border)
        if overlap:
            earliest = max(following - overlap, start + 1)
            before = len(text[:border].rstrip())  # or the cut itself would be found
            place = _border(text, spans[earliest][0], before, last=False)
            following = _token_at(spans, place)
        start = following
    if parts and not text[place:].strip():
        parts[-1] += text[place:]  # no part of its own for what the tokenizer leaves out
    else:
        parts.append(text[place:])
    return parts


def _token_at(spans: Spans, place: int) -> int:
    """The first token that ends behind a place: a border may go through a token."""
    return bisect_right(spans, place, key=lambda span: span[1])


def _border(text: str, low: int, high: int, last: bool = True) -> int:
    """The last place to cut between two, or the first; without any, `high`, or `low`."""
    for pattern in _BORDERS:
        found = [match.end() for match in pattern.finditer(text, low, high)]
        if found:
            return found[-1] if last else found[0]
    return high if last else low


def _between(text: str, spans: Spans, start: int, end: int) -> str:
    """Tokens `start` to `end - 1`, with what the tokenizer left out between them."""
    return text[spans[start][0] if start else 0 : len(text) if end == len(spans) else spans[end][0]]
