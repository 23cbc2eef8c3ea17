"""Lines and tables that fit a terminal: wrapped, truncated, or without what matters less."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from .text_layout import visible

SEPARATOR = " · "  # between the segments of a line
_GAP = 2  # cells between two columns


def wrapped(text: str, columns: int) -> list[str]:
    """Return the text as lines of at most `columns` cells, broken between words; a longer word exceeds them."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if not lines[-1].strip() or cell_len(joined) <= columns:
            lines[-1] = joined
        else:
            lines.append(word)
    return [line.rstrip() for line in lines]


def hanging(text: str, indent: int, columns: int) -> list[str]:
    """Return the line wrapped, with all but its first line indented; not indented where little room is left."""
    if cell_len(text) <= columns or columns < 4 * indent:
        return wrapped(text, columns)
    first, *others = wrapped(text[indent:], columns - indent)
    return [text[:indent] + first, *(" " * indent + line for line in others)]


def lines_text(texts: Iterable[str], width: int | None, style: str = "") -> Text:
    """Return lines wrapped to `width` columns, in a style; None for as many as they need."""
    lines = [line for text in texts for line in ([text] if width is None else wrapped(visible(text), width))]
    return Text("".join(f"{line}\n" for line in lines), style=style)


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


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Args:
        name: its head; may have several lines.
        right: numbers are aligned to the right.
        dropped: columns with the highest value are left out first where a table is too wide, those with 0 never.
        least: cells to which its texts may be truncated; None if they may not.
        style: rich style of the cells.
    """

    name: str
    right: bool = False
    dropped: int = 0
    least: int | None = None
    style: str = ""

    def cells(self, texts: Iterable[str]) -> int:
        """Return the cells that the column takes at least with these texts."""
        return self.least or max(cell_len(line) for text in (self.name, *texts) for line in text.split("\n"))


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None, headed: bool = True) -> Text:
    """Return the table, each line ending with a newline. Cells may have several lines.

    `width` is the terminal's in cells; None for the width that the contents need. Without `headed` the names of the
    columns are left out.
    """
    shown = list(range(len(columns)))
    least = [column.cells(row[number] for row in rows) for number, column in enumerate(columns)]
    while width is not None and sum(least[number] + _GAP for number in shown) - _GAP > width:
        last = max(shown, key=lambda number: columns[number].dropped)
        if columns[last].dropped == 0:
            break
        shown.remove(last)
    grid = Table(box=None, show_header=headed, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for number in shown:
        column = columns[number]
        justify: JustifyMethod = "right" if column.right else "left"
        is_fixed = column.least is None
        grid.add_column(column.name, justify=justify, style=column.style, no_wrap=is_fixed, min_width=column.least)
    for row in rows:
        grid.add_row(*(Text(row[number], no_wrap=True, overflow="ellipsis") for number in shown))
    console = Console(file=StringIO(), width=width or 10_000, force_terminal=True, color_system="standard", _environ={})
    with console.capture() as captured:
        console.print(grid)
    lines = Text.from_ansi(captured.get()).split("\n")
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines).append("\n")
