"""Prints a plan, laid out for a terminal or as JSON, and what is missing where it does not fit."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from textwrap import fill

from rich.text import Text

from offload.hardware.calibration import Measured
from offload.planning.plan import Plan
from offload.planning.suggestions import Suggestion

from ..signals import DONE, FAILED
from .cursor import visible
from .plan_fields import batch_fields, command_line, measured_fields, plan_fields
from .plan_table import comparison_text
from .plan_text import DRAWN, WIDTH, PlanReport, plan_text
from .stdout_formats import json_line
from .tables import JOINER, hanging, wrapped
from .terminal import Terminal


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """The plans for several profiles, each with suggestions if it does not fit.

    `measured` gave the rates of the profiles named in `measured_names`.
    """

    plans: Sequence[tuple[Plan, Sequence[Suggestion]]]
    measured: Measured | None
    measured_names: Sequence[str]


def print_plan(report: PlanReport, command: str, terminal: Terminal, json: bool) -> int:
    """Print the plan to stdout and what is missing to stderr; return the exit code.

    The text of a plan that fits ends with the line of `triforce <command>` for it.
    """
    plan = report.plan
    if json:
        profile = {} if report.profile is None else {"profile": asdict(report.profile)}
        fields = plan_fields(plan, report.suggestions)
        fields |= {"batch": batch_fields(report.batches), "draft_model": report.sibling}
        terminal.write(json_line(type="plan", **profile, measured=measured_fields(report.measured), plan=fields))
    else:
        columns = terminal.table_width
        text = plan_text(report, columns is not None, WIDTH if columns is None else max(4, min(WIDTH, columns - 2)))
        if plan.fits:
            text += f"\n{command_line(command, plan, report.arguments)}\n"
        if columns is None:
            terminal.write(text)
        else:
            terminal.print(laid_out(visible(text), DRAWN, columns))
    if plan.fits:
        return DONE
    terminal.error(plan.shortage(), suggestions_text(report.suggestions))
    return FAILED


def print_comparison(comparison: PlanComparison, terminal: Terminal, json: bool) -> int:
    """Print a table of the plans, or one line of JSON; return the exit code."""
    plans, measured = comparison.plans, comparison.measured
    if json:
        fields = [plan_fields(plan, suggestions) for plan, suggestions in plans]
        terminal.write(json_line(type="comparison", measured=measured_fields(measured), plans=fields))
        return DONE
    if measured is not None:
        names = ", ".join(comparison.measured_names)
        text = f"measured   on {measured.date}: the rates of {names}, of {measured.machine}"
        terminal.write(fill(text, terminal.table_width or 80, subsequent_indent=" " * 11) + "\n")
    terminal.print(comparison_text([plan for plan, _ in plans], terminal.table_width))
    return DONE


def suggestions_text(suggestions: Sequence[Suggestion]) -> str:
    """Return the suggestions in one line, for a hint."""
    texts = [suggestion.text for suggestion in suggestions]
    return "; or ".join(texts) if texts else "use a smaller model, or other hardware"


STYLES = ("cyan", "magenta", "yellow", "green", "blue", "red", "white", "bright_black")  # of a bar's segments, in order
_INDENT = 11  # cells of the names of facts


def laid_out(text: str, marks: str, columns: int) -> Text:
    """Return a plan's text in `columns` cells; `marks` are the characters of its bars' segments."""
    found = Text()
    for line in text.splitlines():
        if line.startswith("["):
            found.append_text(_colored(line, marks))
        elif line[:1] in marks and line:
            found.append_text(Text("\n").join(_colored(each, marks) for each in wrapped(_as_segments(line), columns)))
        elif line.startswith("triforce ") and line[_INDENT - 1 : _INDENT] != " ":  # not the fact about that method
            found.append("\n".join(command_lines(line, columns)), "bold")
        else:
            is_fact = line[_INDENT - 1 : _INDENT] == " " and ":" not in line[:_INDENT]  # as the verdict has
            found.append("\n".join(hanging(line, _INDENT, columns) if is_fact else wrapped(line, columns)))
        found.append("\n")
    return found


def _colored(line: str, marks: str) -> Text:
    return Text.assemble(*((char, STYLES[marks.index(char)] if char in marks else "") for char in line))


def _as_segments(legend: str) -> str:
    """Return a bar's legend with no line break within one of its entries."""
    return "  ".join(entry.replace(" ", JOINER) for entry in legend.split("  "))


def command_lines(command: str, columns: int) -> list[str]:
    """Return a command in lines that a shell reads as one, broken before its options."""
    lines = [""]
    for piece in command.replace(" --", "\0--").split("\0"):
        joined = f"{lines[-1]} {piece}" if lines[-1] else piece
        if len(joined) <= columns - 2 or not lines[-1].strip():
            lines[-1] = joined
        else:
            lines[-1] += " \\"
            lines.append(f"  {piece}")
    return lines
