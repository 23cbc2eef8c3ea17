"""Scores by length and depth as a heat map of coloured cells, which have the numbers too."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

_COLOURS = ("on red3", "on dark_orange3", "on gold3", "on chartreuse3", "on green3")
_CELL = 6


def heat_map(cells: Sequence[Mapping[str, Any]], modes: Sequence[str]) -> list[Text]:
    """Return a map for each mode: a line for each length, and a column for each depth."""
    return [_one(mode, [cell for cell in cells if cell["mode"] == mode]) for mode in modes if cells]


def _one(mode: str, cells: Sequence[Mapping[str, Any]]) -> Text:
    depths = sorted({cell["depth"] for cell in cells})
    scores = {(cell["length"], cell["depth"]): cell["score"] for cell in cells}
    found = Text(f"{mode}, by length and depth\n", style="bold")
    found.append(" " * 9 + "".join(f"{f'{100 * depth:.0f} %':>{_CELL}}" for depth in depths) + "\n", style="not bold")
    for length in sorted({cell["length"] for cell in cells}):
        found.append(f"{length:>8,} ", style="not bold")
        for depth in depths:
            score = scores.get((length, depth))
            text = "" if score is None else f"{100 * score:.0f} "
            found.append(f"{text:>{_CELL}}", style="" if score is None else f"not bold black {_colour(score)}")
        found.append("\n")
    return found


def _colour(score: float) -> str:
    return _COLOURS[min(int(score * len(_COLOURS)), len(_COLOURS) - 1)]
