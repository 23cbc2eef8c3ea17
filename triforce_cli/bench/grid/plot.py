"""Draws a grid: a chart for each pair of a setting that varies and a measure, with a line for each method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..methods import BASE
from ..plot import new_figure, write_figure
from .pivot import Rows, axis_title, value_text
from .report import ACCEPTANCE
from .table import title

_TITLES = {"speedup": "speedup over ar", "tokens_per_s": "tokens per second", ACCEPTANCE: "accepted by the full cache"}
_NONE: Mapping[str, str] = {}
_STYLE = {"marker": "o", "markersize": 3, "capsize": 2}
Series = dict[str, list[tuple[Any, float, float]]]  # by its label: x, y and the deviation of y


def plot(path: Path, report: Rows, titles: Mapping[str, str] = _TITLES, profiles: Mapping[str, str] = _NONE) -> None:
    """Write the charts, a column for each setting and a row for each measure; the file is replaced as a whole.

    `titles` are those of the measures; a measure of `profiles`, which is several numbers by name, has a row of its own.
    """
    axes = list(report.axes) or [None]
    figure = new_figure((5.5 * len(axes), 3.5 * (len(titles) + len(profiles))))
    figure.suptitle(title(report.facts), fontsize=9, wrap=True)
    charts = figure.subplots(len(titles) + len(profiles), len(axes), squeeze=False)
    colours: dict[str, str] = {}  # one for each line, in all charts
    for row, (measure, name) in enumerate(profiles.items(), len(titles)):
        for unused in charts[row][1:]:
            unused.set_visible(False)
        _draw(charts[row][0], _profiles(report, measure), colours)
        charts[row][0].legend(fontsize=7)
        charts[row][0].set_title(name, fontsize=9)
    for row, (measure, name) in enumerate(titles.items()):
        for chart, axis in zip(charts[row], axes, strict=True):
            _draw(chart, series(report, axis, measure), colours)
            chart.legend(fontsize=7)
            chart.set_ylabel(name)
            chart.set_xlabel("" if axis is None else axis_title(axis))
            if axis is not None and all(isinstance(value, int) for value in report.axes[axis]):
                chart.locator_params(axis="x", integer=True)
            chart.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)


def _profiles(report: Rows, measure: str) -> Series:
    """Return a line for each row, over the names of its numbers."""
    found: Series = {}
    for row in report.rows():
        others = [f"{axis_title(name)} {value_text(row[name])}" for name in report.axes if row[name] is not None]
        found[" ".join([row["method"], *others])] = [(name, value, 0.0) for name, value in row[measure].items()]
    return {label: points for label, points in found.items() if points}


def series(report: Rows, axis: str | None, measure: str) -> Series:
    """Return the lines of one chart. A method that does not read the setting is a level line."""
    found: Series = {}
    for row in report.rows():
        value, deviation = _measured(row, measure)
        if value is None or (measure == "speedup" and row["method"] == BASE):
            continue
        read = [name for name in report.axes if name != axis and row[name] is not None]
        others = [f"{axis_title(name)} {value_text(row[name])}" for name in read]
        points = found.setdefault(" ".join([row["method"], *others]), [])
        at = [row["method"]] if axis is None else report.axes[axis] if row[axis] is None else [row[axis]]
        points += [(x, value, deviation or 0.0) for x in at]
    return found


def _measured(row: Mapping[str, Any], measure: str) -> tuple[float | None, float | None]:
    if measure != ACCEPTANCE:
        return row.get(measure), row.get(f"{measure}_sd")
    pair = next((pair for pair in row[ACCEPTANCE] if pair.endswith("full")), None)
    return (None, None) if pair is None else (row[ACCEPTANCE][pair], row[f"{ACCEPTANCE}_sd"][pair])


def _draw(chart: Any, lines: Series, colours: dict[str, str]) -> None:
    for label, points in lines.items():
        colour = colours.setdefault(label, f"C{len(colours) % 10}")
        are_numbers = all(isinstance(x, int | float) for x, _, _ in points)
        xs, ys, deviations = zip(*(sorted(points) if are_numbers else points), strict=True)
        chart.errorbar(
            xs if are_numbers else list(map(value_text, xs)), ys, deviations, label=label, color=colour, **_STYLE
        )
