"""Runs an experiment: its plans, then its grid, then the report."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from offload.errors import SettingsError
from offload.settings.config import DRAFTS
from offload.settings.methods import METHODS

from ..bench.compared import name_of
from ..bench.plot import plot as draw
from ..output.output_files import write_file
from ..output.progress import ProgressDisplay
from ..output.stdout_formats import json_line
from ..output.tables import Column, table
from ..output.terminal import Terminal
from ..signals import DONE, INTERRUPTED
from .definition import Experiment, Value
from .markdown import markdown
from .outcome import Outcome, as_json
from .overrides import ExperimentRequest
from .plans import plan_values
from .shipped import available, load


def run_experiment(asked: ExperimentRequest, terminal: Terminal, display: ProgressDisplay) -> int:
    """Run the experiment and write its report; return the exit code. Closes the display.

    Raises TriforceError, BrokenPipeError.
    """
    values, changed = _values(asked)
    own = _own_flags(asked) if asked.measures else {}
    planned = plan_values(values)
    kind: dict[str, Any] = {"quick": asked.quick, "changed": changed, "other_model": asked.other_model}
    outcome = Outcome(asked.experiment, planned, **kind, command=asked.command)
    if asked.measures:
        from .measured import measure  # from here on torch is needed

        measured, interrupted = measure(asked, own, terminal, display)
        plot = asked.plot.name if asked.plot is not None and measured.rows else None
        outcome = replace(outcome, measured=measured, interrupted=interrupted, plot=plot)
    display.close()
    with ExitStack() as last:  # each is tried, on a full disk too
        if asked.json:
            last.callback(terminal.write, json_line(**as_json(outcome)))
        elif asked.output is None:
            last.callback(terminal.write, markdown(outcome))
        if asked.plot is not None and outcome.measured is not None and outcome.plot is not None:
            last.callback(draw, asked.plot, outcome.measured)
        if asked.output is not None:
            write_file(asked.output, markdown(outcome))
            terminal.note(f"the report is in {asked.output}")
    return INTERRUPTED if outcome.interrupted else DONE


def _values(asked: ExperimentRequest) -> tuple[list[Value], bool]:
    """Return the values with their plans, and whether they were changed for a profile or model that was asked for.

    That is so if nothing is measured: a model that is measured is no reason to plan for it.
    """
    given = {} if asked.measures else asked.given
    chosen: dict[str, Any] = {"gpu": asked.plan_for, "model": given.get("model"), "draft": given.get("draft")}
    chosen = {name: each for name, each in chosen.items() if each is not None and not asked.measures}
    found = []
    for value in asked.experiment.values:
        drafts = value.plan is not None and value.plan.draft is not None
        own: dict[str, Any] = {name: each for name, each in chosen.items() if name != "draft" or drafts}
        own |= {"authors_code": False} if own else {}  # its times are those of the paper's machine
        found.append(replace(value, plan=replace(value.plan, **own)) if value.plan is not None and own else value)
    return found, found != list(asked.experiment.values)


def _own_flags(asked: ExperimentRequest) -> dict[str, Any]:
    """Return the experiment's settings, without its draft model if another model is asked for.

    Raises SettingsError for a method that needs one then.
    """
    flags, grid = asked.grid.flags, asked.grid
    is_other = "model" in asked.given and asked.given["model"] != grid.model
    if grid.draft in (None, *DRAFTS) or not is_other or "draft" in asked.given:
        return flags
    if needing := [method for method in grid.methods if METHODS[name_of(method)].needs_draft_model]:
        raise SettingsError(
            f"{needing[0]} needs a draft model, and the experiment's {grid.draft} is for {grid.model}",
            f"give --draft a model with the vocabulary of {asked.given['model']}",
        )
    return {name: value for name, value in flags.items() if name != "draft"}


def listed() -> list[dict[str, Any]]:
    """Return the experiments that come with the program, with their values. Raises TriforceError."""
    return [_fields(load(name)) for name in available()]


def list_text(experiments: list[dict[str, Any]], width: int | None) -> Any:
    """Return the list as a table without heads."""
    columns = (Column("", style="cyan"), Column("", least=16), Column("", dropped=1), Column(""))
    rows = [(each["name"], each["title"], each["kind"], _agreement(each)) for each in experiments]
    return table(columns, rows, width, headed=False)


def _fields(each: Experiment) -> dict[str, Any]:
    values = Outcome(each, plan_values(each.values)).values()
    errors = [value["error"] for value in values if value["error"] is not None]
    judged = [value for value in values if value["error"] is not None and value["within"] is not None]
    return {
        "name": each.name,
        "title": each.title,
        "kind": _kind(each),
        "published": sum(value["published"] is not None for value in values),
        "planned": sum(value["planned"] is not None for value in values),
        "judged": len(judged),
        "agree": sum(abs(value["error"]) <= value["within"] for value in judged),
        "errors": [min(errors), max(errors)] if errors else None,
        "values": values,
    }


def _kind(each: Experiment) -> str:
    kinds = {"planned": any(value.plan is not None for value in each.values), "measured": each.bench is not None}
    return " and ".join(kind for kind, is_kind in kinds.items() if is_kind)


def _agreement(each: dict[str, Any]) -> str:
    """Return how many values are published, how many planned ones are within their tolerance, and the errors."""
    if not each["published"]:
        return "none published"
    if each["errors"] is None:
        return f"{each['published']} published, none planned"
    least, most = each["errors"]
    return f"{each['published']} published, {each['agree']} of {each['judged']} agree, {least:+.0%} to {most:+.0%}"
