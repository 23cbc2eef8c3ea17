"""Prints a plan, laid out for a terminal or as JSON, and what is missing where it does not fit."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.text import Text

from offload.hardware.calibration import Measured
from offload.planning.plan import Plan
from offload.planning.suggestions import Suggestion

from ..signals import DONE, FAILED
from .plan_fields import batch_fields, command_line, plan_fields
from .plan_text import PlanReport, comparison_text, plan_text
from .stdout_formats import json_line
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
        measured = report.measured and asdict(report.measured)
        fields = plan_fields(plan, report.suggestions) | {"batch": batch_fields(report.batches)}
        fields |= {"draft_model": report.sibling}
        terminal.write(json_line(type="plan", **profile, measured=measured, plan=fields))
    else:
        text = plan_text(report, terminal.table_width)
        if plan.fits:
            text.append(f"\n{command_line(command, plan, report.arguments)}\n", "bold")
        terminal.print(text)
    if plan.fits:
        return DONE
    terminal.error(plan.shortage(), suggestions_text(report.suggestions))
    return FAILED


def print_comparison(comparison: PlanComparison, terminal: Terminal, json: bool) -> int:
    """Print a table of the plans, or one line of JSON; return the exit code."""
    plans, measured = comparison.plans, comparison.measured
    if json:
        fields = [plan_fields(plan, suggestions) for plan, suggestions in plans]
        terminal.write(json_line(type="comparison", measured=measured and asdict(measured), plans=fields))
        return DONE
    text = comparison_text([plan for plan, _ in plans], terminal.table_width)
    if measured is not None:
        names = ", ".join(comparison.measured_names)
        text = Text(f"measured   on {measured.date}: the rates of {names}, of {measured.machine}\n").append_text(text)
    terminal.print(text)
    return DONE


def suggestions_text(suggestions: Sequence[Suggestion]) -> str:
    """Return the suggestions in one line, for a hint."""
    texts = [suggestion.text for suggestion in suggestions]
    return "; or ".join(texts) if texts else "use a smaller model, or other hardware"
