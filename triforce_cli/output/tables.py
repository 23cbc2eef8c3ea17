"""Lines and tables that fit a terminal: wrapped, truncated, or without what matters less."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
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


def lines_text(texts: Iterable[str], width: int | None, style: str = "") -> Text:
    """Return lines wrapped to `width` columns, in a style; None for as many as they need."""
    lines = [line for text in texts for line in ([text] if width is None else wrapped(visible(text), width))]
    return Text("".join(f"{line}\n" for line in lines), style=style)


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


_GAP = 2
_LEAST = 4  # cells of a truncated text


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Args:
        name: its head; may have several lines.
        right: numbers are aligned to the right.
        dropped: columns with the highest value are left out first, those with 0 never.
        least: cells to which its texts may be truncated; None if they may not.
        style: rich style of the cells.
    """

    name: str
    right: bool = False
    dropped: int = 0
    least: int | None = None
    style: str = ""


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None, headed: bool = True) -> Text:
    """Return the table, each line ending with a newline. Cells may have several lines.

    `width` is the terminal's in cells; None for the width that the contents need. Without `headed` the names of the
    columns are left out.
    """
    heads = [[column.name for column in columns]] if headed else []
    sizes = _sizes(columns, [*heads, *rows], width)
    found = Text()
    for row in heads:
        _add_row(found, columns, row, sizes, "bold")
    for row in rows:
        _add_row(found, columns, row, sizes)
    return found


def truncated(text: str, cells: int) -> str:
    """Return the text in at most that many cells, ending with an ellipsis if it was longer."""
    return text if cell_len(text) <= cells else set_cell_size(text, max(cells - 1, 0)).rstrip() + "…"


def _sizes(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> dict[int, int]:
    """Return the cells of each column that is shown, by its number."""
    sizes = {number: _natural(rows, number) for number in range(len(columns))}
    flexible = [number for number, column in enumerate(columns) if column.least is not None]
    while width is not None and (excess := sum(sizes.values()) + _GAP * (len(sizes) - 1) - width) > 0:
        excess = _shrink(sizes, {n: columns[n].least for n in flexible if n in sizes}, excess)
        if excess <= 0:
            break
        last = max(sizes, key=lambda number: columns[number].dropped)
        if columns[last].dropped == 0:
            _shrink(sizes, {n: _LEAST for n in flexible if n in sizes}, excess)
            break
        del sizes[last]
        sizes |= {n: max(sizes[n], _natural(rows, n)) for n in flexible if n in sizes}
    return sizes


def _natural(rows: Sequence[Sequence[str]], number: int) -> int:
    """Return the cells that the contents of a column need."""
    return max((cell_len(line) for row in rows for line in row[number].split("\n")), default=0)


def _shrink(sizes: dict[int, int], least: dict[int, int], excess: int) -> int:
    """Take the excess cells from the widest of these columns, down to their least; return what is left of it."""
    while excess > 0:
        candidates = [number for number, cells in least.items() if sizes[number] > cells]
        if not candidates:
            break
        sizes[max(candidates, key=sizes.__getitem__)] -= 1
        excess -= 1
    return excess


def _add_row(
    found: Text, columns: Sequence[Column], row: Sequence[str], sizes: dict[int, int], style: str = ""
) -> None:
    cells = {number: row[number].split("\n") for number in sizes}
    for index in range(max(map(len, cells.values()))):
        line = Text()
        for number, size in sizes.items():
            lines = cells[number]
            text = truncated(lines[index], size) if index < len(lines) else ""
            blank = " " * (size - cell_len(text))
            line.append(blank + text if columns[number].right else text + blank, style or columns[number].style)
            line.append(" " * _GAP)
        line.rstrip()
        found.append_text(line).append("\n")
