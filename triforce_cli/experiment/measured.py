"""The rows of an experiment that no single grid of `bench` has: of several engines, or of another kind than speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from ..bench.grid.pivot import Measure
from ..output.format import rounded

Row = Mapping[str, Any]
UNMEASURED = {"repeats": 1, "spread": None, "equals_ar": None, "lossless": None, "acceptance": {}, "acceptance_sd": {}}


@dataclass(frozen=True, slots=True)
class MeasuredRows:
    """Rows like those of a grid's report.

    Args:
        facts: the machine and the request, as a grid's report has them.
        axes: the values of what varies.
        records: a row for each method and point.
        shown: the measures that have a table each.
        profiles: likewise, measures that are several numbers, by a name.
        other_load: cores that other processes used.
    """

    facts: Mapping[str, Any]
    axes: Mapping[str, Sequence[Any]]
    records: Sequence[Row]
    shown: Sequence[Measure]
    profiles: Sequence[Measure] = ()
    other_load: float | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of numbers for each method and point."""
        return [dict(row) for row in self.records]

    def as_json(self, interrupted: bool) -> dict[str, Any]:
        """Return everything."""
        axes = {name: list(values) for name, values in self.axes.items()}
        found = dict(self.facts) | {"other_load_cores": self.other_load, "points": self.rows()}
        exact = {"settings": self.facts["settings"], "axes": axes}
        return {"type": "bench_grid", "interrupted": interrupted, **rounded(found), **exact}


def mean_row(rows: Sequence[Row], measures: Sequence[Measure], profiles: Sequence[Measure]) -> dict[str, Any]:
    """Return the row of means over the prompts, with the standard deviation of each measure; None for one prompt."""
    found: dict[str, Any] = {**UNMEASURED, "prompts": len(rows)}
    found["prompt_tokens"] = mean(row["prompt_tokens"] for row in rows)
    for measure in measures:
        values = [row[measure.name] for row in rows if row[measure.name] is not None]
        found[measure.name] = mean(values) if values else None
        found[f"{measure.name}_sd"] = stdev(values) if len(values) > 1 else None
    for profile in profiles:
        names = dict.fromkeys(name for row in rows for name in row[profile.name])
        found[profile.name] = {
            name: mean(row[profile.name][name] for row in rows if name in row[profile.name]) for name in names
        }
    return found
