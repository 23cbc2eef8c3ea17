"""An experiment's report in Markdown: published, planned and measured values, how they are judged, and conditions."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version

from offload.units import counted

from ..bench.grid.pivot import Pivot, pivots, value_text
from ..bench.grid.report import GridReport
from ..bench.grid.table import doubts
from ..bench.methods import BASE
from .files import ROOT
from .judge import Verdict, judge_check, judge_value, measured_value
from .measured import MeasuredRows
from .plans import Planned
from .schema import Experiment

_UNITS = {"speedup": "x", "tbt_ms": " ms/token", "tokens_per_s": " tokens/s"}
_OUTCOMES = {True: "holds", False: "**does not hold**", None: "not judged"}


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
    measured: GridReport | MeasuredRows | None = None
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


def markdown(outcome: Outcome) -> str:
    """Return the report."""
    experiment = outcome.experiment
    parts = [f"# {experiment.title}", f"Reproduces: {experiment.reproduces.strip()}"]
    parts.append(f"The published set-up needs: {experiment.needs.strip()}")
    if outcome.interrupted:
        parts.append("**Interrupted: not all has run.**")
    parts += [*_values(outcome), *_measured(outcome), *_verdicts(outcome)]
    parts += [f"## What this shows\n\n{experiment.shows.strip()}", *_conditions(outcome)]
    return "\n\n".join(parts) + "\n"


def _values(outcome: Outcome) -> Iterator[str]:
    """Yield the table of the published values beside those planned or measured."""
    rows = outcome.measured.rows() if outcome.measured is not None and outcome.is_own else []
    lines = []
    for each in outcome.planned:
        value, unit = each.value, _UNITS.get(each.value.measure, "")
        measured = measured_value(value, rows)
        found = "-" if measured is None else f"{measured:.4g}{unit} (measured)"
        if measured is None and each.planned is not None:
            found = f"{each.planned:.4g}{unit} (planned)"
        if measured is None and each.reason:
            found = f"does not fit (planned): {each.reason}"
        published = "-" if value.published is None else f"{value.published:g}{unit}"
        lines.append((value.what, published, found, value.source or "-"))
    if lines:
        yield "## Published, and planned or measured here"
        yield _table(("value", "published", "here", "source of the published value"), lines)
    if outcome.changed:
        yield "Planned for another model or GPU than the published values: only their order can be compared."


def _measured(outcome: Outcome) -> Iterator[str]:
    report = outcome.measured
    if report is None or not report.records:
        return
    facts = report.facts
    yield f"## Measured on {facts['model']}{', quick' if outcome.quick else ''}"
    if not outcome.is_own:
        what = "A small model and short texts" if outcome.quick else "Another model, draft model or quantisation"
        yield f"{what}, not the published set-up: compare no number here with a published one."
    for pivot in _pivots(report):
        yield f"**{pivot.title}**"
        yield _table(pivot.heads, pivot.rows)
    if found := list(doubts(report)):
        yield "\n".join(f"- {each}" for each in found)
    drafting = [row for row in report.rows() if row["method"] != BASE and row["equals_ar"] is not None]
    if drafting:
        equal = sum(row["equals_ar"] for row in drafting)
        yield f"Output equal to plain decoding's, greedy or coupled: {equal} of {counted(len(drafting), 'row')}."
    if outcome.plot is not None:
        yield f"![The charts]({outcome.plot})"


def _pivots(report: GridReport | MeasuredRows) -> list[Pivot]:
    return pivots(report) if isinstance(report, GridReport) else pivots(report, report.shown, report.profiles)


def verdicts_of(outcome: Outcome) -> list[Verdict]:
    """Return what the rules say of what was planned and measured."""
    report = outcome.measured
    rows = [] if report is None else report.rows()
    verdicts: list[Verdict] = []
    if not outcome.changed and (outcome.quick or outcome.is_own):
        own = [] if outcome.quick else rows
        found = [judge_value(each, measured_value(each.value, own)) for each in outcome.planned]
        verdicts += [each for each in found if each is not None]
    if rows:
        runs = ("both", "quick" if outcome.quick else "full")
        found = [judge_check(check, rows) for check in outcome.experiment.judge if check.runs in runs]
        verdicts += found if outcome.quick or outcome.is_own else [replace(each, holds=None) for each in found]
    return verdicts


def _verdicts(outcome: Outcome) -> Iterator[str]:
    """Yield how it is judged, and what holds."""
    yield f"## Judged\n\n{outcome.experiment.judged.strip()}"
    if verdicts := verdicts_of(outcome):
        lines = [(each.what, _OUTCOMES[each.holds], each.numbers) for each in verdicts]
        yield _table(("rule", "outcome", "numbers"), lines)


def _conditions(outcome: Outcome) -> Iterator[str]:
    commit = git_commit()
    facts = {"command": f"`{outcome.command}`", "triforce": version("triforce")} | (
        {"commit": commit} if commit else {}
    )
    facts["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if outcome.measured is not None:
        grid = outcome.experiment.quick if outcome.quick else outcome.experiment.bench
        facts |= _run_conditions(outcome.measured.facts)
        facts["settings"] = "; ".join(f"{name} {_listed(value)}" for name, value in grid.settings.items())
    else:
        facts["hardware"] = "none: only planned, from data sheets"
    yield "## Conditions"
    yield _table(("", ""), list(facts.items()))


def _run_conditions(facts: Mapping[str, object]) -> dict[str, str]:
    machine, settings = facts["machine"], facts["settings"]
    prompts = ", ".join(f"{each['name']} ({each['tokens']:,} tokens)" for each in facts["prompts"])
    torch = {"torch": machine["torch"]} if "torch" in machine else {}
    return {
        **torch,
        "hardware": f"{machine['name']}, {counted(machine['threads'], 'thread')}, {machine['engine']}",
        "model": str(facts["model"]),
        "draft": str(settings["draft"]),
        "prompts": prompts,
        "repeats": str(facts["repeats"]),
        "seed": str(settings["seed"]),
    }


def _listed(value: object) -> str:
    return ", ".join(map(value_text, value if isinstance(value, list) else [value]))


def git_commit() -> str | None:
    """Return the commit that runs, marked if files differ from it; None outside of a checkout or without git."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return None
    command = [git, "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
