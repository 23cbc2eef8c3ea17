"""Draws a report. matplotlib is an optional extra, imported only where a chart is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import SettingsError

from ..output.output_files import check_file, write_file
from .compared import BASE
from .report import ACCEPTANCE, BENCH, QUALITY, SHOWN, Report, axis_title, value_text
from .report_text import title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INSTALL = "install it in the folder of triforce: pip install '.[plot]'"
_SPEED = {"speedup": "speedup over ar", "tokens_per_s": "tokens per second", ACCEPTANCE: "accepted by the full cache"}
_STYLE = {"marker": "o", "markersize": 3, "capsize": 2}
Series = dict[str, list[tuple[Any, float, float]]]  # by its label: x, y and the deviation of y


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: a line for each label, or bars where x is what is compared itself."""

    series: Series
    y: str
    x: str = ""
    heading: str = ""
    whole: bool = False
    bars: bool = False


def check_plot(path: Path) -> None:
    """Raise SettingsError if no chart could be written there, before the benchmark runs."""
    if find_spec("matplotlib") is None:
        raise SettingsError("--plot needs matplotlib, which is not installed", _INSTALL)
    check_file(path, "--plot", "bench.png")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kinds = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise SettingsError(f"--plot cannot write {path.name}", f"end its name in one of: {', '.join(kinds)}")


def plot(path: Path, report: Report) -> None:
    """Write the report's charts; the file is replaced as a whole."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    rows = charts(report)
    columns = max(map(len, rows))
    figure = Figure(figsize=(max(5.5 * columns, 5.0), 3.5 * len(rows) + 1), layout="constrained")
    figure.suptitle(title(report.facts), fontsize=9, wrap=True)
    places = figure.subplots(len(rows), columns, squeeze=False)
    colours: dict[str, str] = {}  # one for each line, in all charts
    for row, axes in zip(rows, places, strict=True):
        for unused in axes[len(row) :]:
            unused.set_visible(False)
        for chart, each in zip(row, axes, strict=False):
            _draw(chart, each, colours)
    write_figure(figure, path)


def charts(report: Report) -> list[list[Chart]]:
    if report.kind == BENCH:
        rates = [(row["method"], row["tokens_per_s"] or 0.0, 0.0) for row in report.rows]
        return [[Chart({"": rates}, "tokens per second", bars=True)]]
    if report.kind == QUALITY:
        return [_quality(report)]
    titles = _SPEED if report.shown == SHOWN else {each.name: each.title for each in report.shown}
    axes: list[str | None] = [*report.axes] or [None]
    found = [[_by_axis(report, axis, measure, name) for axis in axes] for measure, name in titles.items()]
    return found + [[Chart(_profile(report, each.name), "", heading=each.title)] for each in report.profiles]


def _by_axis(report: Report, axis: str | None, measure: str, name: str) -> Chart:
    whole = axis is not None and all(isinstance(value, int) for value in report.axes[axis])
    return Chart(series(report, axis, measure), name, "" if axis is None else axis_title(axis), whole=whole)


def _quality(report: Report) -> list[Chart]:
    """Return perplexity by position, needles by depth, and divergence against memory."""
    positions: Series = {}
    needles: Series = {}
    memory: Series = {}
    for row in report.rows:
        mode = row["mode"]
        positions[mode] = [(each["to"], each["perplexity"], 0.0) for each in row["perplexity_by_position"]]
        if row["needles"]:
            needles[mode] = [(each["depth"], each["log_prob"], 0.0) for each in row["needles"]]
        size = (row["kv_bytes"] + row["weights_bytes"]) / 2**20
        if row["kl"] is not None:
            memory[f"{mode} · {1000 * row['token_s']:.0f} ms"] = [(size, row["kl"], 0.0)]
    found = [Chart(positions, "perplexity", "scored tokens")]
    found += [Chart(needles, "log-probability of its token", "depth of the needle")] if needles else []
    found += [Chart(memory, "KL divergence from exact, nats", "weights and KV, MiB")] if memory else []
    return found


def _profile(report: Report, measure: str) -> Series:
    """Return a line for each row, over the names of its numbers."""
    found: Series = {}
    for row in report.rows:
        others = [f"{axis_title(name)} {value_text(row[name])}" for name in report.axes if row[name] is not None]
        found[" ".join([row["method"], *others])] = [(name, value, 0.0) for name, value in row[measure].items()]
    return {label: points for label, points in found.items() if points}


def series(report: Report, axis: str | None, measure: str) -> Series:
    """Return the lines of one chart. A method that does not read the setting is a level line."""
    found: Series = {}
    for row in report.rows:
        value, deviation = _measured(row, measure)
        if value is None or (measure == "speedup" and row["method"] == BASE):
            continue
        read = [name for name in report.axes if name != axis and row[name] is not None]
        others = [f"{axis_title(name)} {value_text(row[name])}" for name in read]
        points = found.setdefault(" ".join([row["method"], *others]), [])
        at: Sequence[Any] = [row["method"]]
        if axis is not None:
            at = report.axes[axis] if row[axis] is None else [row[axis]]
        points += [(x, value, deviation or 0.0) for x in at]
    return found


def _measured(row: Mapping[str, Any], measure: str) -> tuple[float | None, float | None]:
    if measure != ACCEPTANCE:
        return row.get(measure), row.get(f"{measure}_sd")
    pair = next((pair for pair in row[ACCEPTANCE] if pair.endswith("full")), None)
    return (None, None) if pair is None else (row[ACCEPTANCE][pair], row[f"{ACCEPTANCE}_sd"][pair])


def _draw(chart: Chart, axes: Any, colours: dict[str, str]) -> None:
    for label, points in chart.series.items():
        colour = colours.setdefault(label.partition(" · ")[0], f"C{len(colours) % 10}")
        are_numbers = all(isinstance(x, int | float) for x, _, _ in points)
        xs, ys, deviations = zip(*(sorted(points) if are_numbers else points), strict=True)
        at = xs if are_numbers else list(map(value_text, xs))
        if chart.bars:
            axes.bar_label(axes.bar(at, ys, color=colour), fmt="%.1f", padding=2)
            axes.margins(y=0.12)
        else:
            around = deviations if any(deviations) else None
            axes.errorbar(at, ys, around, label=label, color=colour, **_STYLE)
    if chart.series and not chart.bars:
        axes.legend(fontsize=7)
    axes.set_title(chart.heading, fontsize=9)
    axes.set_ylabel(chart.y)
    axes.set_xlabel(chart.x)
    if chart.whole:
        axes.locator_params(axis="x", integer=True)
    axes.spines[["top", "right"]].set_visible(False)


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure; the file, or that which a link leads to, is replaced as a whole."""
    data = BytesIO()
    figure.savefig(data, format=path.suffix.removeprefix("."), dpi=150)
    write_file(path, data.getvalue())
