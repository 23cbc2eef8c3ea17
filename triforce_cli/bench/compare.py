"""Runs a benchmark and writes its report: tables or JSON, and the files that were asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from offload.api.opened_model import OpenModel

from ..exit_codes import DONE, INTERRUPTED
from ..options.command_request import Request
from ..options.settings import Settings
from ..output.output_files import write_file
from ..output.plan_report import print_plan
from ..output.progress import ProgressDisplay
from ..output.stdout_formats import json_line
from ..output.terminal import Terminal
from ..run.plan import plan_run
from .benchmark import BenchRequest
from .measure import run_measurement
from .opened import open_bench
from .options import STDOUT
from .plot import plot
from .quality import measure_modes
from .quality_modes import QualityRequest, open_quality_run
from .report import Report, csv_text
from .report_text import report_text


@dataclass(frozen=True, slots=True)
class BenchOutput:
    """The form of the output: JSON or tables, without progress, and files for the charts and a table."""

    json: bool
    quiet: bool
    plot: Path | None = None
    csv: Path | None = None

    def plan(
        self,
        model: OpenModel,
        settings: Settings,
        length: int,
        request: Request,
        terminal: Terminal,
        display: ProgressDisplay,
    ) -> int:
        """Write the plan of a dry run in place of a report; return the exit code. Closes the display."""
        found = plan_run(model, settings, length, terminal)
        display.close()  # the plan is the output
        return print_plan(replace(found, arguments=request.arguments), request.command, terminal, self.json)

    def write(self, report: Report, terminal: Terminal, interrupted: bool, to_files: bool = True) -> int:
        """Write the report; return the exit code. Raises OSError, BrokenPipeError."""
        if report.rows and to_files:  # first: stdout may be a closed pipe
            if self.csv not in (None, STDOUT):
                write_file(self.csv, csv_text(report))
            if self.plot is not None:
                plot(self.plot, report)
        if self.json:
            terminal.write(json_line(**report.as_json(interrupted)))
        elif report.rows and self.csv == STDOUT:
            terminal.write(csv_text(report))
        elif report.rows:
            terminal.print(report_text(report, terminal.table_width))
        return INTERRUPTED if interrupted else DONE


def run_bench(asked: BenchRequest, terminal: Terminal, output: BenchOutput, display: ProgressDisplay) -> int:
    """Run what is not finished, and write the report; return the exit code. Closes the display.

    Raises TriforceError, OSError.
    """
    request = asked.request
    if request.dry_run:
        widest = open_bench(asked, terminal, output.quiet).widest
        return output.plan(widest.model, widest.settings, widest.length, request, terminal, display)
    run = run_measurement(asked, terminal, output.quiet, display)
    is_first = request.group is None or request.group.rank == 0
    return output.write(run.report(), terminal, run.interrupted, is_first)


def run_quality(asked: QualityRequest, terminal: Terminal, output: BenchOutput, display: ProgressDisplay) -> int:
    """Measure every mode and write the report; return the exit code. Closes the display.

    Ctrl-C writes the modes that are done. Raises TriforceError, OSError.
    """
    run, request = open_quality_run(asked, terminal, output.quiet), asked.request
    if request.dry_run:
        exact = run.modes[0]
        return output.plan(exact.model, exact.settings, run.length, request, terminal, display)
    found = measure_modes(run, terminal, display)
    is_first = request.group is None or request.group.rank == 0
    return output.write(found.report(), terminal, found.interrupted, is_first)
