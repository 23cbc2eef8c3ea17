"""What an experiment measures from, the points of what is no grid of `bench`, and the rows of its report."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from offload.engine import Engine
from offload.settings.config import Sampling

from ..bench.axes import CONTEXT, points
from ..bench.report import BY_PAIR, GRID, Measure, Report, Row, provenance
from ..bench.rows import mean_and_deviation
from ..input.dataset import DataText
from ..options.settings import Settings
from ..output.progress import ProgressDisplay
from ..output.terminal import Terminal
from .grid import Grid
from .overrides import ExperimentRequest

Key = tuple[str, tuple[tuple[str, Any], ...]]  # the method, and the values of the axes
_UNMEASURED: dict[str, Any] = {
    "repeats": 1,
    "spread": None,
    "equals_ar": None,
    "lossless": None,
    **{f"{name}{suffix}": {} for name in BY_PAIR for suffix in ("", "_sd")},
}


class Inputs(NamedTuple):
    """What a measurement is made from: the request, the experiment's `own` settings, its texts, and the displays."""

    asked: ExperimentRequest
    own: Mapping[str, Any]
    texts: Sequence[DataText]
    terminal: Terminal
    display: ProgressDisplay


def excerpts(inputs: Inputs) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of the grid's excerpts of each text, which begin at words far from each other.

    Of a data set they are its first texts, as they are.
    """
    count, is_dataset = inputs.asked.grid.prompts, inputs.asked.data is not None
    for each in inputs.texts[:count] if is_dataset else inputs.texts:
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


def facts_of(settings: Settings, engine: Engine, new_tokens: int | None = None) -> dict[str, Any]:
    """Return the machine and the settings, for a report."""
    device = engine.model.device
    return provenance(device, engine.describe()) | {
        "model": settings.engine.model,
        "new_tokens": new_tokens,
        "settings": settings.described(Sampling(temperature=0)) | {"device": device.type},
    }


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
