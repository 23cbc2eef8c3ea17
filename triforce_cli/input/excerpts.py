"""Cuts a document by its tokens: a range that is asked for, parts that fit a context, and what --truncate keeps.

Both are cut at the ends of tokens, in the text itself: nothing is encoded and decoded again.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.errors import PromptError, SettingsError
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
        return (self.tokens or 0) if self.fraction is None else round(self.fraction * total)

    def __str__(self) -> str:
        return f"{self.tokens:,}" if self.fraction is None else f"{100 * self.fraction:g}%"


def parse_position(text: str) -> Position:
    """Return the position that "10%", "2000" or "2K" stands for. Raises SettingsError."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        try:
            return Position(tokens=0 if text.strip() == "0" else parse_tokens(text))
        except SettingsError as error:
            raise SettingsError(error.message, f"{error.hint}, or as a part of the text: 10%") from None
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
    """Return the text without a part, and how many of its tokens are in it: up to `kept`. Words stay whole."""
    first = {START: 0, MIDDLE: kept // 2, END: kept}[dropped]
    head, tail = 0, len(text)
    if first:
        end = spans[first][0]
        found = list(_SPACE.finditer(text, max(end - _WORD, 1), end))
        head = found[-1].start() if found else end
    if first < kept:
        start = spans[len(spans) - (kept - first)][0]
        match = _SPACE.search(text, start, min(start + _WORD, len(text) - 1))
        tail = match.end() if match else start
    tokens = bisect_right(spans, head, key=lambda span: span[1]) if head else 0
    tokens += len(spans) - bisect_left(spans, tail, key=lambda span: span[0]) if tail < len(text) else 0
    return (GAP if head and tail < len(text) else "").join((text[:head], text[tail:])), tokens
