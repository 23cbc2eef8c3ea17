"""Runs a grid and writes its report: tables or JSON, and the files that were asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ...exit_codes import DONE, INTERRUPTED
from ...output.output_files import write_file
from ...output.plan import print_plan
from ...output.progress import ProgressDisplay
from ...output.stdout_formats import json_line
from ...output.terminal import Terminal
from ...run.plan import plan_run
from .axes import STDOUT
from .opened import open_grid
from .plot import plot
from .report import GridReport, csv_text
from .request import GridRequest
from .run import run_grid
from .table import report_text


@dataclass(frozen=True, slots=True)
class GridOutput:
    """The form of the output: JSON or tables, without progress, and files for the charts and a table."""

    json: bool
    quiet: bool
    plot: Path | None = None
    csv: Path | None = None


def bench_grid(asked: GridRequest, terminal: Terminal, output: GridOutput, display: ProgressDisplay) -> int:
    """Run what is not finished, and write the report; return the exit code. Closes the display.

    Raises TriforceError, BrokenPipeError.
    """
    request = asked.request
    if request.dry_run:
        widest = open_grid(asked, terminal, output.quiet).widest
        plan = plan_run(widest.model, widest.settings, widest.length, terminal)
        display.close()  # the plan is the output
        return print_plan(replace(plan, arguments=request.arguments), request.command, terminal, output.json)
    run = run_grid(asked, terminal, output.quiet, display)
    report = run.report()
    to_stdout = output.csv == STDOUT
    if report.records and (request.group is None or request.group.rank == 0):
        write_files(report, replace(output, csv=None) if to_stdout else output)  # first: stdout may be a closed pipe
    if output.json:
        terminal.write(json_line(**report.as_json(run.interrupted)))
    elif report.records and to_stdout:
        terminal.write(csv_text(report))
    elif report.records:
        terminal.print(report_text(report, terminal.table_width))
    return INTERRUPTED if run.interrupted else DONE


def write_files(report: GridReport, output: GridOutput) -> None:
    """Write the charts and the table, each whole or not at all. Raises OSError."""
    if output.csv is not None:
        write_file(output.csv, csv_text(report))
    if output.plot is not None:
        plot(output.plot, report)
