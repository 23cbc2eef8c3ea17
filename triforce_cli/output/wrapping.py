"""Fits lines to a terminal: wraps them between segments, else between words, or leaves segments out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from .cursor import visible

SEPARATOR = " · "  # between the segments of a line
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|%|[kKMGT]?i?B)(?!\w))")  # a number and its unit are one word
JOINER = "\ue000"  # stands for a space at which no line is broken


def wrapped(text: str, columns: int) -> list[str]:
    """Return the line as lines of at most `columns` cells; only a word that is longer exceeds them.

    A line break between segments replaces their separator.
    """
    lines = [""]
    for segment in _BEFORE_UNIT.sub(JOINER, text).split(SEPARATOR):
        joined = f"{lines[-1]}{SEPARATOR}{segment}" if lines[-1] else segment
        if cell_len(joined) <= columns:
            lines[-1] = joined
        else:
            lines += [""] if lines[-1] else []
            _add_words(lines, segment.split(" "), columns)
    return [line.replace(JOINER, " ") for line in lines]


def hanging(text: str, indent: int, columns: int) -> list[str]:
    """Return the line wrapped, with all but its first line indented; not indented where little room is left."""
    if cell_len(text) <= columns or columns < 4 * indent:
        return wrapped(text, columns)
    first, *rest = wrapped(text[indent:], columns - indent)
    return [text[:indent] + first, *(" " * indent + line for line in rest)]


def _add_words(lines: list[str], words: list[str], columns: int) -> None:
    """Add words to the last line, and to new lines where it is full."""
    lines[-1] = words[0]
    for word in words[1:]:
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(joined) <= columns:
            lines[-1] = joined
        else:
            lines[-1] = lines[-1].rstrip()
            lines.append(word)


class Segment(NamedTuple):
    """A segment of a line. Those with the highest `dropped` are left out first, those with 0 never."""

    text: str
    style: str = ""
    dropped: int = 0


def fitted(segments: Sequence[Segment], columns: int) -> Text:
    """Return the segments that fit, joined."""
    segments = list(segments)
    while True:
        line = Text(SEPARATOR).join(Text(visible(segment.text), style=segment.style) for segment in segments)
        least = max(segments, key=lambda segment: segment.dropped)
        if line.cell_len <= columns or least.dropped == 0:
            return line
        segments.remove(least)
