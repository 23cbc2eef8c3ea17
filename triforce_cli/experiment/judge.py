"""Judges what was planned and measured by the rules of an experiment. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..bench.report import BY_PAIR
from .definition import Check, Value
from .grid import MEASURES
from .plans import Planned

Row = Mapping[str, Any]


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
