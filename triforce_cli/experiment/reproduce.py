"""Runs an experiment: its plans, then its grid, then the report."""

from dataclasses import replace
from typing import Any

from offload.errors import SettingsError
from offload.settings.config import DRAFTS
from offload.settings.methods import METHODS

from ..bench.compared import name_of
from ..output.output_files import write_file
from ..output.progress import ProgressDisplay
from ..output.stdout_formats import json_line
from ..output.terminal import Terminal
from ..signals import DONE, INTERRUPTED
from .definition import Value
from .markdown import markdown
from .outcome import Outcome, as_json
from .overrides import ExperimentRequest
from .plans import plan_values


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
    if asked.output is not None:
        write_file(asked.output, markdown(outcome))
        terminal.note(f"the report is in {asked.output}")
    if asked.json:
        terminal.write(json_line(**as_json(outcome)))
    elif asked.output is None:
        terminal.write(markdown(outcome))
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
