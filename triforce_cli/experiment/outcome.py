"""What an experiment has found, how it is judged, and both as one JSON object."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..bench.report import Report, versioned
from .definition import Experiment
from .judge import Verdict, error_of, judge_check, judge_value, measured_value
from .plans import Planned
from .shipped import ROOT


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an experiment has found.

    Args:
        measured: the report of its grid; None where nothing ran.
        quick: whether that was the quick grid, whose model and machine are not the paper's.
        other_model: whether another model, draft or quantisation than the experiment's was measured.
        changed: planned for another model or GPU than the paper's.
        plot: the name of the file with the charts, as the report links it.
    """

    experiment: Experiment
    planned: Sequence[Planned]
    measured: Report | None = None
    quick: bool = False
    other_model: bool = False
    changed: bool = False
    plot: str | None = None
    command: str = ""
    interrupted: bool = False

    @property
    def is_own(self) -> bool:
        """Return whether what was measured is the experiment's set-up, so that published numbers can be compared."""
        return not (self.quick or self.other_model)

    def values(self) -> list[dict[str, Any]]:
        """Return the published values beside those planned or measured, with the errors; None where there is none."""
        rows = self.measured.rows if self.measured is not None and self.is_own else []
        return [_value(each, measured_value(each.value, rows), not self.changed) for each in self.planned]


def _value(each: Planned, measured: float | None, is_own: bool) -> dict[str, Any]:
    value = each.value
    published = value.published if is_own else None  # a plan for another GPU or model has no error
    found = each.planned if measured is None else measured
    names = ("what", "measure", "published", "within", "source")
    return {name: getattr(value, name) for name in names} | {
        "planned": each.planned,
        "reason": each.reason or None,
        "measured": measured,
        "error": error_of(found, published),
        "authors_code": each.authors_code,
        "authors_code_error": error_of(each.authors_code, published),
    }


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the fields of the object. What was not measured or planned is null."""
    experiment, measured = outcome.experiment, outcome.measured
    names = ("name", "title", "reproduces", "needs", "shows", "judged")
    return {
        "type": "experiment",
        **{name: getattr(experiment, name).strip() for name in names},
        "interrupted": outcome.interrupted,
        "quick": outcome.quick,
        "own_setup": outcome.is_own and not outcome.changed,
        "values": outcome.values(),
        "measured": None if measured is None else measured.as_json(outcome.interrupted),
        "verdicts": [asdict(each) for each in verdicts_of(outcome)],
        "command": outcome.command,
        "commit": git_commit(),
        **versioned(),
    }


def verdicts_of(outcome: Outcome) -> list[Verdict]:
    """Return what the rules say of what was planned and measured."""
    report = outcome.measured
    rows = [] if report is None else report.rows
    verdicts: list[Verdict] = []
    if not outcome.changed and (outcome.quick or outcome.is_own):
        own = [] if outcome.quick else rows
        found = [judge_value(each, measured_value(each.value, own)) for each in outcome.planned]
        verdicts += [each for each in found if each is not None]
    if rows:
        runs = ("both", "quick" if outcome.quick else "full")
        checked = [judge_check(check, rows) for check in outcome.experiment.judge if check.runs in runs]
        verdicts += checked if outcome.quick or outcome.is_own else [replace(each, holds=None) for each in checked]
    return verdicts


def git_commit() -> str | None:
    """Return the commit that runs, marked if files differ from it; None outside of a checkout or without git."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return None
    command = [git, "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
