"""Wraps lines for a terminal: between segments, else between words, never within a word."""

from __future__ import annotations

import re

from rich.cells import cell_len

SEPARATOR = " · "  # between the segments of a line
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|%|[kKMGT]?i?B)(?!\w))")  # a number and its unit are one word
_JOINER = "\0"  # stands for a space at which no line is broken


def wrapped(text: str, columns: int) -> list[str]:
    """Return the line as lines of at most `columns` cells; only a word that is longer exceeds them.

    A line break between segments replaces their separator.
    """
    lines = [""]
    for segment in _BEFORE_UNIT.sub(_JOINER, text).split(SEPARATOR):
        joined = f"{lines[-1]}{SEPARATOR}{segment}" if lines[-1] else segment
        if cell_len(joined) <= columns:
            lines[-1] = joined
        else:
            lines += [""] if lines[-1] else []
            _add_words(lines, segment.split(" "), columns)
    return [line.replace(_JOINER, " ") for line in lines]


def _add_words(lines: list[str], words: list[str], columns: int) -> None:
    """Add words to the last line, and to new lines where it is full."""
    lines[-1] = words[0]
    for word in words[1:]:
        if cell_len(lines[-1]) + 1 + cell_len(word) <= columns:
            lines[-1] += f" {word}"
        else:
            lines[-1] = lines[-1].rstrip()
            lines.append(word)
