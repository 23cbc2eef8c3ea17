"""The texts and the points of a measurement that is no grid of `bench`, and the rows of its report."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from ..bench.axes import CONTEXT, points
from ..bench.report import BY_PAIR, GRID, Measure, Report, Row
from ..bench.rows import mean_and_deviation
from ..input.dataset import DataText
from .grid import Grid

Key = tuple[str, tuple[tuple[str, Any], ...]]  # the method, and the values of the axes
_UNMEASURED: dict[str, Any] = {
    "repeats": 1,
    "spread": None,
    "equals_ar": None,
    "lossless": None,
    **{f"{name}{suffix}": {} for name in BY_PAIR for suffix in ("", "_sd")},
}


def excerpts(texts: Sequence[DataText], count: int, is_dataset: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of `count` excerpts of each text, which begin at words far from each other.

    Of a data set they are its first `count` texts, as they are.
    """
    for each in texts[:count] if is_dataset else texts:
        number_of = 1 if is_dataset else count
        for number in range(number_of):
            start = len(each.text) * number // number_of
            start = each.text.find(" ", start) + 1 if start else 0
            yield (each.name if number_of == 1 else f"{each.name} {number + 1}/{count}"), each.text[start:]


def points_of(grid: Grid) -> Iterator[dict[str, Any]]:
    """Yield the combinations of values that run, with those of settings that do not vary."""
    lists = {name: value if isinstance(value, list) else [value] for name, value in grid.settings.items()}
    for values in points(dict(sorted(lists.items(), key=lambda each: each[0] != CONTEXT))):
        if not grid.only or any(each.items() <= values.items() for each in grid.only):
            yield values


def report_of(
    grid: Grid,
    facts: Mapping[str, Any],
    prompts: Mapping[str, int],
    found: Mapping[Key, Sequence[Row]],
    shown: Sequence[Measure],
    profiles: Sequence[Measure],
) -> Report:
    """Return the report of what was `found` of each key, a row of it for each of the `prompts`."""
    contexts = {CONTEXT: grid.contexts} if CONTEXT in grid.varied and grid.contexts is not None else {}
    axes = contexts | {name: tuple(values) for name, values in grid.axes.items()}
    facts = {**facts, "prompts": [{"name": name, "tokens": tokens} for name, tokens in prompts.items()], "repeats": 1}
    rows = [
        {"method": method, **dict(values), **_mean_row(each, shown, profiles)}
        for (method, values), each in found.items()
    ]
    return Report(GRID, facts, rows, axes, shown, profiles)


def _mean_row(rows: Sequence[Row], measures: Sequence[Measure], profiles: Sequence[Measure]) -> dict[str, Any]:
    """Return the row of means over the prompts, with the standard deviation of each measure; None for one prompt."""
    found = {**_UNMEASURED, "prompts": len(rows)}
    found["prompt_tokens"] = mean(row["prompt_tokens"] for row in rows)
    for measure in measures:
        found |= mean_and_deviation(measure.name, [row[measure.name] for row in rows])
    for profile in profiles:
        names = dict.fromkeys(name for row in rows for name in row[profile.name])
        found[profile.name] = {
            name: mean(row[profile.name][name] for row in rows if name in row[profile.name]) for name in names
        }
    return found
