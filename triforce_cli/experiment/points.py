"""The points of a measurement that is no grid of `bench`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..bench.grid.axes import CONTEXT, points
from .grid import Grid


def points_of(grid: Grid) -> Iterator[dict[str, Any]]:
    """Yield the combinations of values that run, with those of settings that do not vary."""
    lists = {name: value if isinstance(value, list) else [value] for name, value in grid.settings.items()}
    for values in points(dict(sorted(lists.items(), key=lambda each: each[0] != CONTEXT))):
        if not grid.only or any(each.items() <= values.items() for each in grid.only):
            yield values
