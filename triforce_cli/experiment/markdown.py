"""An experiment's report in Markdown: published, planned and measured values, how they are judged, and conditions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from offload.units import counted

from ..bench.compared import BASE
from ..bench.report import pivots, value_text, versioned
from ..bench.report_text import notes
from .outcome import Outcome, git_commit, verdicts_of

_UNITS = {"speedup": "x", "tbt_ms": " ms/token", "tokens_per_s": " tokens/s"}
_OUTCOMES = {True: "holds", False: "**does not hold**", None: "not judged"}


def markdown(outcome: Outcome) -> str:
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
    values = outcome.values()
    heads = ["value", "published", "here", "error", "the authors' code (planned)", "error", "source"]
    lines = [heads, *map(_value, values)]
    if all(each["authors_code"] is None for each in values):
        lines = [[*line[:4], line[6]] for line in lines]
    if values:
        yield "## Published, and planned or measured here"
        yield _table(lines[0], lines[1:])
    if outcome.changed:
        yield "Planned for another model or GPU than the published values: only their order can be compared."


def _value(each: Mapping[str, Any]) -> list[str]:
    """Return the cells of a value's row."""
    unit, within = _UNITS.get(each["measure"], ""), each["within"]
    found = each["reason"] or "-"
    for name in ("measured", "planned"):
        if each[name] is not None:
            found = f"{each[name]:.4g}{unit} ({name})"
            break
    published = "-" if each["published"] is None else f"{each['published']:g}{unit}"
    code = "-" if each["authors_code"] is None else f"{each['authors_code']:.4g}{unit}"
    errors = [error_text(each[name], within) for name in ("error", "authors_code_error")]
    return [each["what"], published, found, errors[0], code, errors[1], each["source"] or "-"]


def error_text(error: float | None, within: float | None = None) -> str:
    """Return an error in percent, marked if it exceeds the tolerance."""
    if error is None:
        return "-"
    missed = within is not None and abs(error) > within
    return f"{error:+.1%}{f' (**more than {within:.0%}**)' if missed else ''}"


def _measured(outcome: Outcome) -> Iterator[str]:
    report = outcome.measured
    if report is None or not report.rows:
        return
    facts = report.facts
    yield f"## Measured on {facts['model']}{', quick' if outcome.quick else ''}"
    if not outcome.is_own:
        what = "A small model and short texts" if outcome.quick else "Another model, draft model or quantisation"
        yield f"{what}, not the published set-up: compare no number here with a published one."
    for pivot in pivots(report):
        yield f"**{pivot.title}**"
        yield _table(pivot.heads, pivot.rows)
    if found := list(notes(report)):
        yield "\n".join(f"- {each}" for each in found)
    drafting = [row for row in report.rows if row["method"] != BASE and row["equals_ar"] is not None]
    if drafting:
        equal = sum(row["equals_ar"] for row in drafting)
        yield f"Output equal to plain decoding's, greedy or coupled: {equal} of {counted(len(drafting), 'row')}."
    if outcome.plot is not None:
        yield f"![The charts]({outcome.plot})"


def _verdicts(outcome: Outcome) -> Iterator[str]:
    """Yield how it is judged, and what holds."""
    yield f"## Judged\n\n{outcome.experiment.judged.strip()}"
    if verdicts := verdicts_of(outcome):
        lines = [(each.what, _OUTCOMES[each.holds], each.numbers) for each in verdicts]
        yield _table(("rule", "outcome", "numbers"), lines)


def _conditions(outcome: Outcome) -> Iterator[str]:
    commit = git_commit()
    here = versioned()
    facts = {"command": f"`{outcome.command}`", "triforce": here["triforce"]} | ({"commit": commit} if commit else {})
    facts["date"] = here["date"]
    if outcome.measured is not None:
        grid = outcome.experiment.grid(outcome.quick)
        facts |= _run_conditions(outcome.measured.facts)
        facts["settings"] = "; ".join(f"{name} {_listed(value)}" for name, value in grid.settings.items())
    else:
        facts["hardware"] = "none: only planned, from data sheets"
    yield "## Conditions"
    yield _table(("", ""), list(facts.items()))


def _run_conditions(facts: Mapping[str, Any]) -> dict[str, str]:
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


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
