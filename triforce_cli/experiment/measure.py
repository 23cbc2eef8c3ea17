"""Measures what an experiment asks for, and draws it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.errors import PromptError, SettingsError

from ..bench.grid.plot import plot
from ..bench.grid.report import GridReport
from ..input.dataset import DataText, read_dataset
from ..input.documents import read_documents
from ..output.progress import ProgressDisplay
from ..output.terminal import Terminal
from .attention import measure_attention
from .files import BOOK
from .kinds import ATTENTION, QUALITY, SPEED
from .measured import MeasuredRows
from .quality import measure_quality
from .request import ExperimentRequest
from .speed import measure_speed

_MEASUREMENTS = {SPEED: measure_speed, QUALITY: measure_quality, ATTENTION: measure_attention}


def measure(
    asked: ExperimentRequest, own: Mapping[str, Any], terminal: Terminal, display: ProgressDisplay
) -> tuple[GridReport | MeasuredRows, bool]:
    """Measure the experiment's grid with its `own` settings; return what was found, and whether Ctrl-C ended it.

    Writes the charts that were asked for. Raises TriforceError, OSError.
    """
    kind = asked.grid.kind
    if asked.points is not None and kind != SPEED:
        raise SettingsError(f"--points keeps runs, and {asked.experiment.name} measures {kind}", "leave --points out")
    report, interrupted = _MEASUREMENTS[kind](asked, own, _texts(asked, terminal), terminal, display)
    if asked.plot is not None and report.records:
        _plot(asked.plot, report)
    return report, interrupted


def _plot(path: Path, report: GridReport | MeasuredRows) -> None:
    if isinstance(report, GridReport) or not report.profiles:
        plot(path, report)
        return
    titles = {each.name: each.title for each in report.shown}
    plot(path, report, titles, {each.name: each.title for each in report.profiles})


def _texts(asked: ExperimentRequest, terminal: Terminal) -> list[DataText]:
    if asked.data is not None:
        return read_dataset(asked.data, terminal.warn)
    files = list(asked.files)
    if not files and not BOOK.is_file():
        raise PromptError("the example book is not part of this installation", "give a text with --prompt-file")
    found = read_documents(files or [BOOK], terminal.stdin, terminal.warn)
    return [DataText(Path(document.name).name, document.text) for document in found]
