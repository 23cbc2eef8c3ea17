"""What an experiment has found, how it is judged, and both as one JSON object."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from ..bench.report import BY_PAIR, Report, versioned
from .definition import Check, Experiment, Value
from .grid import MEASURES
from .plans import Planned
from .shipped import ROOT

Row = Mapping[str, Any]

# Of a row, everything but its method and the settings that vary.
_MEASURED = (
    set(MEASURES)
    | {"prompts", "repeats", "prompt_tokens", "spread", "equals_ar", "lossless"}
    | {
        f"{name}{suffix}"
        for name in ("tokens_per_s", "speedup", "tokens_per_verification", "tbt_median_s", *MEASURES)
        for suffix in ("", "_sd")
    }
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a rule holds, None where nothing was measured for it, with the numbers that say so."""

    what: str
    holds: bool | None
    numbers: str


def measure_of(row: Row, measure: str, pair: str | None = None) -> float | None:
    """Return a measure of a row of the grid's report; None if the row does not have it."""
    if measure in BY_PAIR:
        return row[measure].get(pair)
    if measure == "tbt_ms":
        return 1000 / row["tokens_per_s"] if row["tokens_per_s"] else None
    return row.get(measure)


def measured_value(value: Value, rows: Sequence[Row]) -> float | None:
    """Return what was measured for a published value: its row's measure; None if no row is meant, or none has run."""
    wanted = {name: each for name, each in value.row.items() if name != "pair"}
    found = [row for row in rows if wanted and all(row.get(name) == each for name, each in wanted.items())]
    return measure_of(found[0], value.measure, value.row.get("pair")) if len(found) == 1 else None


def error_of(found: float | None, published: float | None) -> float | None:
    """Return by which share of the published value another one differs from it; None where there is not both."""
    return None if found is None or not published else found / published - 1


def judge_value(planned: Planned, measured: float | None) -> Verdict | None:
    """Return whether the measured, else the planned value is near enough to the published one; None without a rule."""
    value = planned.value
    found = planned.planned if measured is None else measured
    if value.within is None or value.published is None:
        return None
    if found is None:
        return Verdict(value.what, None, planned.reason or "nothing was measured")
    off = error_of(found, value.published) or 0.0
    kind = "planned" if measured is None else "measured"
    numbers = f"{kind} {found:.4g}, published {value.published:g}: {off:+.1%}, at most {value.within:.0%}"
    return Verdict(value.what, abs(off) <= value.within, numbers)


def judge_check(check: Check, rows: Sequence[Row]) -> Verdict:
    """Return whether a rule holds for the rows of its method."""
    meant = {"method": check.method, **check.row}
    own = [row for row in rows if all(row.get(name) == value for name, value in meant.items())]
    measured = [(row, value) for row in own if (value := measure_of(row, check.measure, check.pair)) is not None]
    if not measured:
        return Verdict(check.what, None, "nothing was measured")
    if check.along is None:
        least = min(value for _, value in measured)
        return Verdict(check.what, least >= check.at_least, f"the least is {least:.4g}, at least {check.at_least:g}")
    lines = _lines(check.along, measured)
    steps = [(one, other) for line in lines for one, other in pairwise(line)]
    if not steps:
        return Verdict(check.what, None, f"only one value of {check.along} was measured")
    sign = 1 if check.direction == "rises" else -1
    worst = max(sign * (one - other) for one, other in steps)
    shown = "; ".join(" → ".join(f"{value:.3g}" for value in line) for line in lines)
    return Verdict(check.what, worst <= check.tolerance, f"{shown} (tolerance {check.tolerance:g})")


def _lines(along: str, measured: Sequence[tuple[Row, float]]) -> list[list[float]]:
    """Return the values in the order of one setting, a list for each combination of the others."""
    first = measured[0][0]
    is_profile = {name for name, value in first.items() if isinstance(value, Mapping)}
    settings = [name for name in first if name not in _MEASURED | is_profile and name != along]
    found: dict[tuple[Any, ...], list[tuple[Any, float]]] = {}
    for row, value in measured:
        found.setdefault(tuple(row[name] for name in settings), []).append((row[along], value))
    return [[value for _, value in sorted(line)] for line in found.values()]


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
