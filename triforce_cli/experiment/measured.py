"""Measures what an experiment asks for: speed and acceptance are grids of `bench`, one for each engine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.errors import PromptError, SettingsError

from ..bench.benchmark import BenchRequest
from ..bench.compared import parse_methods
from ..bench.measure import run_measurement
from ..bench.measurement import Measurement
from ..bench.report import GRID, Report, mean_of
from ..input.dataset import DataText, read_dataset
from ..input.dataset import asked as ask
from ..input.documents import read_documents
from ..output.progress import ProgressDisplay
from ..output.terminal import Terminal
from .drafters import measure_drafters
from .grid import ATTENTION, DRAFTERS, HITTERS, QUALITY, SPEED
from .hitters import measure_hitters
from .overrides import ExperimentRequest
from .points import Inputs
from .quality_grid import measure_quality
from .selections import measure_attention
from .shipped import BOOK


def measure(
    asked: ExperimentRequest, own: Mapping[str, Any], terminal: Terminal, display: ProgressDisplay
) -> tuple[Report, bool]:
    """Measure the experiment's grid with its `own` settings; return what was found, and whether Ctrl-C ended it.

    Raises TriforceError, OSError.
    """
    kind = asked.grid.kind
    if asked.points is not None and kind != SPEED:
        raise SettingsError(f"--points keeps runs, and {asked.experiment.name} measures {kind}", "leave --points out")
    return _MEASUREMENTS[kind](Inputs(asked, own, _texts(asked, terminal), terminal, display))


def _texts(asked: ExperimentRequest, terminal: Terminal) -> list[DataText]:
    if asked.data is not None:
        return read_dataset(asked.data, terminal.warn)
    files = list(asked.files)
    if not files and not BOOK.is_file():
        raise PromptError("the example book is not part of this installation", "give a text with --prompt-file")
    found = read_documents(files or [BOOK], terminal.stdin, terminal.warn)
    return [DataText(Path(document.name).name, document.text) for document in found]


def _measure_speed(inputs: Inputs) -> tuple[Report, bool]:
    """Run the grid with each engine; return its report, and whether it was interrupted. Raises TriforceError."""
    asked, own, texts, terminal, display = inputs
    grid = asked.grid
    requests = [_request(asked, own, more, texts) for more in grid.each or ({},)]  # all checked before the first run
    runs: list[Measurement] = []
    display.close()
    for request in requests:
        shown = ProgressDisplay(terminal, not asked.quiet)  # every run closes its own
        runs.append(run_measurement(request, terminal, asked.quiet, shown))
        if runs[-1].interrupted:
            break
    reports = [run.report() for run in runs]
    found = _merged(reports, grid.engines, grid.each) if grid.each else reports[0]
    return found, runs[-1].interrupted


def _request(
    asked: ExperimentRequest, own: Mapping[str, Any], more: Mapping[str, Any], texts: Sequence[DataText]
) -> BenchRequest:
    grid = asked.grid
    named = [(each.name, each.text) for each in texts]
    rest: dict[str, Any] = {"endings": {each.name: ask(each.question) for each in texts}}
    rest |= {"is_dataset": asked.data is not None, "points": asked.points, "batches": grid.batches, "only": grid.only}
    sizes = grid.contexts, grid.prompts, grid.repeats
    return BenchRequest(
        asked.request(own, more), named, parse_methods(",".join(grid.methods)), grid.axes, *sizes, **rest
    )


def _merged(
    reports: Sequence[Report], engines: Mapping[str, Sequence[Any]], each: Sequence[Mapping[str, Any]]
) -> Report:
    """Return the rows of all engines, each with the settings that make its engine another one."""
    varied = {name: values for name, values in engines.items() if len(values) > 1}
    rows = []
    for report, settings in zip(reports, each, strict=False):
        of_engine = {name: settings.get(name) for name in varied}
        rows += [{"method": row["method"], **of_engine, **row} for row in report.rows]
    facts = dict(reports[0].facts)
    facts["settings"] = {**facts["settings"], **dict.fromkeys(varied)}
    load = mean_of(report.other_load for report in reports)
    return Report(GRID, facts, rows, {**varied, **reports[0].axes}, other_load=load)


_MEASUREMENTS = {
    SPEED: _measure_speed,
    QUALITY: measure_quality,
    ATTENTION: measure_attention,
    HITTERS: measure_hitters,
    DRAFTERS: measure_drafters,
}
