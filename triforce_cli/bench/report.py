"""The report of a measurement: rows of numbers, as JSON and as CSV. Imports neither engine nor terminal."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from ..output.format import rounded

BENCH, BATCHES, GRID, QUALITY = "bench", "bench_batch", "bench_grid", "quality"  # types of reports
_ROWS = {BENCH: "methods", BATCHES: "batches", GRID: "points", QUALITY: "modes"}  # what JSON calls their rows
ACCEPTANCE, ACCEPTED = "acceptance", "accepted_of_drafted"
BY_PAIR = {ACCEPTANCE: "acceptance a token", ACCEPTED: "accepted of drafted"}  # measures by "drafter -> verifier"

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure of a row, with what it is called and how it is written."""

    name: str
    title: str
    text: Callable[[float], str]


SHOWN = (
    Measure("speedup", "speedup over ar", "{:.2f}".format),
    Measure("tokens_per_s", "tokens/s", "{:.2f}".format),
    Measure("tokens_per_verification", "tokens/verification", "{:.2f}".format),
)


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured.

    Args:
        kind: the type of its JSON object, which decides about the tables and the charts too.
        facts: the machine and the request.
        rows: one for each method, mode or point that has run; everything in them is part of the JSON object.
        axes: the values of each setting that varies.
        shown: the measures that have a table each, where a setting varies.
        profiles: likewise, measures that are several numbers, by a name.
        other_load: cores that other processes used; None where it was not measured.
    """

    kind: str
    facts: Mapping[str, Any]
    rows: Sequence[Row]
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    shown: Sequence[Measure] = SHOWN
    profiles: Sequence[Measure] = ()
    other_load: float | None = None

    def as_json(self, interrupted: bool) -> dict[str, Any]:
        """Return everything; settings and axes have all their digits."""
        exact: dict[str, Any] = {"settings": self.facts["settings"]}
        if self.kind == GRID:
            exact["axes"] = {name: list(values) for name, values in self.axes.items()}
        found = {**self.facts, "other_load_cores": self.other_load, _ROWS[self.kind]: list(self.rows)}
        return {"type": self.kind, "interrupted": interrupted, **rounded(found), **exact}


def csv_text(report: Report) -> str:
    """Return a table with a line for each method and point; the measures by pair have a column for each."""
    columns = [f"{name}{suffix}" for name in BY_PAIR for suffix in ("", "_sd")]
    pairs = list(dict.fromkeys(pair for row in report.rows for name in BY_PAIR for pair in row[name]))
    flat = []
    for row in report.rows:
        parts = {name: value for name, value in rounded(row).items() if name not in columns}
        parts |= {f"{name} {pair}": rounded(row[name].get(pair)) for pair in pairs for name in columns}
        flat.append({"model": report.facts["model"]} | parts)
    text = StringIO()
    writer = csv.DictWriter(text, list(flat[0]) if flat else ["model"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()
