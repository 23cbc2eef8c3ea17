"""Tables that fit the terminal: long texts are truncated, then the less important columns are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

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
