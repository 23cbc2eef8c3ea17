"""Measures speed and acceptance: grids of `bench`, one for each engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..bench.grid.pivot import SHOWN
from ..bench.grid.report import GridReport
from ..bench.grid.request import GridRequest
from ..bench.grid.run import GridRun, run_grid
from ..bench.methods import parse
from ..input.dataset import DataText
from ..input.dataset import asked as ask
from ..output.progress import ProgressDisplay
from ..output.terminal import Terminal
from .measured import MeasuredRows
from .request import ExperimentRequest


def measure_speed(
    asked: ExperimentRequest,
    own: Mapping[str, Any],
    texts: Sequence[DataText],
    terminal: Terminal,
    display: ProgressDisplay,
) -> tuple[GridReport | MeasuredRows, bool]:
    """Run the grid with each engine; return its report, and whether it was interrupted. Raises TriforceError."""
    grid = asked.grid
    requests = [_request(asked, own, more, texts) for more in grid.each or ({},)]  # all checked before the first run
    runs: list[GridRun] = []
    display.close()
    for request in requests:
        shown = ProgressDisplay(terminal, not asked.quiet)  # every run closes its own
        runs.append(run_grid(request, terminal, asked.quiet, shown))
        if runs[-1].interrupted:
            break
    reports = [run.report() for run in runs]
    found = _merged(reports, grid.engines, grid.each) if grid.each else reports[0]
    return found, runs[-1].interrupted


def _request(
    asked: ExperimentRequest, own: Mapping[str, Any], more: Mapping[str, Any], texts: Sequence[DataText]
) -> GridRequest:
    grid = asked.grid
    endings = {each.name: ask(each.question) for each in texts}
    named = [(each.name, each.text) for each in texts]
    rest: dict[str, Any] = {"endings": endings, "is_dataset": asked.data is not None}
    rest |= {"points": asked.points, "batches": grid.batches, "only": grid.only}
    sizes = grid.contexts, grid.prompts, grid.repeats
    return GridRequest(asked.request(own, more), named, parse(",".join(grid.methods)), grid.axes, *sizes, **rest)


def _merged(
    reports: Sequence[GridReport], engines: Mapping[str, Sequence[Any]], each: Sequence[Mapping[str, Any]]
) -> MeasuredRows:
    """Return the rows of all engines, each with the settings that make its engine another one."""
    varied = {name: values for name, values in engines.items() if len(values) > 1}
    rows = []
    for report, settings in zip(reports, each, strict=False):
        of_engine = {name: settings.get(name) for name in varied}
        rows += [{"method": row.pop("method"), **of_engine, **row} for row in report.rows()]
    loads = [report.other_load for report in reports if report.other_load is not None]
    load = sum(loads) / len(loads) if loads else None
    facts = dict(reports[0].facts)
    facts["settings"] = {**facts["settings"], **dict.fromkeys(varied)}
    return MeasuredRows(facts, {**varied, **reports[0].axes}, rows, SHOWN, other_load=load)
