"""Pivots the rows of a grid: a table for each measure, with a column for each value of one of the settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..output.format import percent
from .axes import AXES
from .compared_methods import BASE
from .report import BY_PAIR, Measure, Report, Row


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
