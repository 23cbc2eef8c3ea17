"""The report of a measurement: its rows and conditions, as JSON, as CSV and as pivot tables. Imports no engine."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from io import StringIO
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from ..output.format import percent, rounded
from ..run.processor import processor
from .axes import AXES
from .compared import BASE

if TYPE_CHECKING:
    import torch

BENCH, BATCHES, GRID, QUALITY, LADDER = "bench", "bench_batch", "bench_grid", "quality", "bench_ladder"  # of reports
_ROWS = {
    BENCH: "methods",
    BATCHES: "batches",
    GRID: "points",
    QUALITY: "modes",
    LADDER: "steps",
}  # what JSON calls their rows
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
        if self.kind in (GRID, LADDER):
            exact["axes"] = {name: list(values) for name, values in self.axes.items()}
        found = {**self.facts, "other_load_cores": self.other_load, _ROWS[self.kind]: list(self.rows)}
        return {"type": self.kind, "interrupted": interrupted, **rounded(found), **exact}


def csv_text(report: Report) -> str:
    """Return a table with a line for each method and point; the measures by pair have a column for each."""
    columns = [f"{name}{suffix}" for name in BY_PAIR for suffix in ("", "_sd")]
    pairs = list(dict.fromkeys(pair for row in report.rows for name in BY_PAIR for pair in row[name]))
    flat = []
    for row in report.rows:
        parts = {name: value for name, value in rounded(row).items() if not isinstance(value, dict | list)}
        parts |= {f"{name} {pair}": rounded(row[name].get(pair)) for pair in pairs for name in columns if name in row}
        flat.append({"model": report.facts["model"]} | parts)
    text = StringIO()
    heads = dict.fromkeys(name for row in flat for name in row)
    writer = csv.DictWriter(text, list(heads) or ["model"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


@dataclass(frozen=True, slots=True)
class Pivot:
    """A table of one measure: `heads` names the columns, and each of the `rows` has a text for each."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def value_text(value: Any) -> str:
    """Return the value of a setting as text; `-` for a method that does not read it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def axis_title(name: str) -> str:
    """Return what a setting that varies is called."""
    return AXES[name].title if name in AXES else name.replace("_", "-")


def pivots(report: Report) -> list[Pivot]:
    """Return a table for each measure that any row has. The setting with the columns is the last one that varies.

    Of its profiles, a row has several numbers by name, which are the columns.
    """
    rows = report.rows
    found = [_pivot(report, measure, _cells(rows, measure)) for measure in report.shown]
    found += [_profile(report, rows, each) for each in report.profiles]
    for name, title in BY_PAIR.items():
        pairs = [
            (row, (pair,), percent(rate) + ("" if (sd := row[f"{name}_sd"][pair]) is None else f" ±{100 * sd:.0f}"))
            for row in rows
            for pair, rate in row[name].items()
        ]
        found.append(_pivot(report, Measure(name, title, percent), pairs, ("drafter → verifier",)))
    return [pivot for pivot in found if pivot.rows]


def _cells(rows: Sequence[Row], measure: Measure) -> list[tuple[Row, tuple[str, ...], str]]:
    """Return each row that has the measure, with nothing more to tell it from others, and the text of its cell."""
    found: list[tuple[Row, tuple[str, ...], str]] = []
    for row in rows:
        value, deviation = row.get(measure.name), row.get(f"{measure.name}_sd")
        is_one = row["method"] == BASE and measure.name != "tokens_per_s"  # by definition
        if value is None or is_one:
            continue
        found.append((row, (), measure.text(value) + ("" if deviation is None else f" ±{measure.text(deviation)}")))
    return found


def _profile(report: Report, rows: Sequence[Row], measure: Measure) -> Pivot:
    names = tuple(dict.fromkeys(name for row in rows for name in row[measure.name]))
    heads = ("method", *(axis_title(name) for name in report.axes), *names)
    lines = []
    for row in rows:
        values = row[measure.name]
        texts = [measure.text(values[name]) if name in values else "" for name in names]
        if values:
            lines.append((row["method"], *(value_text(row[name]) for name in report.axes), *texts))
    return Pivot(measure.title, heads, tuple(lines))


def _pivot(
    report: Report, measure: Measure, cells: Sequence[tuple[Row, tuple[str, ...], str]], more: tuple[str, ...] = ()
) -> Pivot:
    """Arrange the cells. A method that does not read the columns' setting has the same text in all of them."""
    axes = list(report.axes)
    across = axes[-1] if axes else None
    down = axes[:-1]
    columns = tuple(report.axes[across]) if across else (None,)
    lines: dict[tuple[str, ...], dict[Any, str]] = {}
    for row, extra, text in cells:
        line = lines.setdefault((row["method"], *extra, *(value_text(row[name]) for name in down)), {})
        value = row[across] if across else None
        line |= dict.fromkeys(columns if value is None else (value,), text)
    by = f" by {axis_title(across)}" if across else ""
    names = tuple(value_text(value) for value in columns) if across else (measure.title,)
    heads = ("method", *more, *(axis_title(name) for name in down), *names)
    texts = tuple((*line, *(found.get(value, "") for value in columns)) for line, found in lines.items())
    return Pivot(f"{measure.title}{by}", heads, texts)


LARGEST_SPREAD = 0.10  # of the runs of a method; above, it is flagged
LARGEST_LOAD = 0.25  # cores used by other processes; above, it is flagged


def provenance(device: torch.device, engine: str) -> dict[str, Any]:
    """Return the version, the date and the machine, whose `engine` is described in text, for a report."""
    import torch

    return versioned() | {
        "machine": {
            "name": processor(device),
            "threads": torch.get_num_threads(),
            "engine": engine,
            "torch": torch.__version__,
        },
    }


def versioned() -> dict[str, str]:
    return {"triforce": version("triforce"), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of those that were measured; None where none was."""
    found = [value for value in values if value is not None]
    return mean(found) if found else None


def spread(values: Sequence[float]) -> float | None:
    """Return the range of the values relative to their median; None for fewer than two."""
    return (max(values) - min(values)) / median(values) if len(values) > 1 else None
