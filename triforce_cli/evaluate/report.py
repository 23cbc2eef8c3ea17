"""The scores of an evaluation: by task and mode with intervals, and by length and depth; as text, JSON and CSV."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from random import Random
from statistics import mean
from typing import Any

from rich.text import Text

from offload.errors import TriforceError
from offload.settings.config import LEAST_BUDGET
from offload.units import counted

from ..bench.cells import Record
from ..bench.compared import EXACT
from ..output.format import rounded
from ..output.tables import SEPARATOR, Column, table
from .request import EvaluateRequest

ALL = "all"  # the row of all tasks
_COLUMNS = ("mode", "task", "length", "depth", "seed", "prompt_tokens", "score", "seconds", "answers", "output")
_COLOURS = ("on red3", "on dark_orange3", "on gold3", "on chartreuse3", "on green3")
_CELL = 6  # of the heat map, in characters
_Z = 1.959964  # of the standard normal distribution: 95 % lie within
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was answered: the records of all items that are done. `facts` describe the machine and the model.

    `errors` have ended modes before their last items.
    """

    asked: EvaluateRequest
    facts: Mapping[str, Any]
    records: Sequence[Record]
    interrupted: bool = False
    errors: Sequence[TriforceError] = ()

    @property
    def modes(self) -> list[str]:
        return list(dict.fromkeys(record["mode"] for record in self.records))

    def scores(self, mode: str, **where: Any) -> dict[tuple[Any, ...], float]:
        """Return the scores of a mode by what was asked, of the records with these values."""
        return {
            tuple(record[name] for name in ("task", "length", "depth", "seed")): record["score"]
            for record in self.records
            if record["mode"] == mode and all(record[name] == value for name, value in where.items())
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each mode and task, and for each mode and all tasks: the mean with its interval.

        `difference` is against the exact mode on the same items, with its interval; None where that did not run.
        """
        tasks = list(dict.fromkeys(record["task"] for record in self.records))
        return [self._row(mode, task) for task in [*tasks, ALL] for mode in self.modes]

    def _row(self, mode: str, task: str) -> dict[str, Any]:
        where = {} if task == ALL else {"task": task}
        own, exact = self.scores(mode, **where), self.scores(EXACT, **where)
        pairs = [score - exact[key] for key, score in own.items() if key in exact] if mode != EXACT else []
        row = {"mode": mode, "task": task, "items": len(own)}
        return row | {
            "score": mean(own.values()) if own else None,
            "interval": wilson(list(own.values())) if own else None,
            "difference": mean(pairs) if pairs else None,
            "difference_interval": bootstrap(pairs) if pairs else None,
        }

    def cells(self) -> list[dict[str, Any]]:
        """Return the mean score of each mode, length and depth, over all tasks that have a depth."""
        placed = [record for record in self.records if record["depth"] is not None]
        places = sorted({(record["length"], record["depth"]) for record in placed})
        found = [
            ({"mode": mode, "length": length, "depth": depth}, self.scores(mode, length=length, depth=depth))
            for mode in self.modes
            for length, depth in places
        ]
        return [{**place, "score": mean(scores.values())} for place, scores in found if scores]

    def as_json(self) -> dict[str, Any]:
        """Return the report without the records."""
        rows = {"rows": self.rows(), "cells": self.cells()}
        return {"type": "evaluation", "interrupted": self.interrupted, **rounded({**self.facts, **rows})}


def csv_text(evaluation: Evaluation) -> str:
    """Return a table with a line for each answer."""
    text = StringIO()
    writer = csv.DictWriter(text, _COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**record, "answers": "; ".join(record["answers"])} for record in evaluation.records)
    return text.getvalue()


def evaluation_text(evaluation: Evaluation, width: int | None) -> Text:
    """Return the title, the scores by task and mode, and a heat map for each mode."""
    rows, modes = evaluation.rows(), evaluation.modes
    if not rows:
        return Text("nothing was answered\n")
    facts, count = evaluation.facts, len(evaluation.scores(modes[0]))
    title = (facts["machine"]["name"], facts["machine"]["engine"], facts["model"], counted(count, "item"))
    parts = [Text(SEPARATOR.join(each for each in title if each) + "\n")]
    columns = [Column("score of 100", style="cyan")]
    columns += [Column(mode, right=True, dropped=number) for number, mode in enumerate(modes)]
    by_task: dict[str, list[str]] = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append(_score(row))
    parts.append(table(columns, [[task, *texts] for task, texts in by_task.items()], width))
    parts += heat_map(evaluation.cells(), modes)
    notes = "".join(f"{line}\n" for line in _notes(rows, evaluation.records))
    return Text("\n").join([*parts, *([Text(notes, style="yellow")] if notes else [])])


def _score(row: Mapping[str, Any]) -> str:
    if row["score"] is None:
        return ""
    low, high = row["interval"]
    return f"{100 * row['score']:.0f} ({100 * low:.0f}-{100 * high:.0f})"


def _notes(rows: Sequence[Mapping[str, Any]], records: Sequence[Record]) -> Iterator[str]:
    """Yield what a reader should know: differences from the exact mode, and tasks that tell nothing."""
    for row in rows:
        if row["task"] == ALL and row["difference"] is not None:
            low, high = (100 * each for each in row["difference_interval"])
            sure = "" if low <= 0 <= high else ", more than chance"
            points = f"{100 * row['difference']:+.1f} points ({low:+.1f} to {high:+.1f})"
            yield f"{row['mode']} against exact: {points}{sure}"
    if whole := _whole(records):
        yield f"no prompt is longer than what {', '.join(whole)} keep: take a longer --context, or a smaller --budget"
    failed = [row["task"] for row in rows if row["mode"] == EXACT and row["score"] is not None and row["score"] < 0.5]
    failed = [task for task in failed if task != ALL]
    if failed:
        yield f"the exact model itself fails at {', '.join(failed)}: these compare no modes"
    yield "in brackets: 95 % intervals (Wilson's; of differences on the same items, bootstrap)"


def _whole(records: Sequence[Record]) -> list[str]:
    """Return the approximate modes whose cache has room for all tokens of every prompt."""
    fit: dict[str, bool] = {}
    for record in records:
        mode, settings = record["mode"], record["settings"]
        if settings.get("approximate"):
            fits = record["prompt_tokens"] <= (settings.get("budget") or LEAST_BUDGET)
            fit[mode] = fit.get(mode, True) and fits
    return [mode for mode, fits in fit.items() if fits]


def heat_map(cells: Sequence[Mapping[str, Any]], modes: Sequence[str]) -> list[Text]:
    """Return a map for each mode: a line for each length, and a column for each depth."""
    return [_one(mode, [cell for cell in cells if cell["mode"] == mode]) for mode in modes if cells]


def _one(mode: str, cells: Sequence[Mapping[str, Any]]) -> Text:
    depths = sorted({cell["depth"] for cell in cells})
    scores = {(cell["length"], cell["depth"]): cell["score"] for cell in cells}
    found = Text(f"{mode}, by length and depth\n", style="bold")
    found.append(" " * 9 + "".join(f"{f'{100 * depth:.0f} %':>{_CELL}}" for depth in depths) + "\n", style="not bold")
    for length in sorted({cell["length"] for cell in cells}):
        found.append(f"{length:>8,} ", style="not bold")
        for depth in depths:
            score = scores.get((length, depth))
            text = "" if score is None else f"{100 * score:.0f} "
            found.append(f"{text:>{_CELL}}", style="" if score is None else f"not bold black {_colour(score)}")
        found.append("\n")
    return found


def _colour(score: float) -> str:
    return _COLOURS[min(int(score * len(_COLOURS)), len(_COLOURS) - 1)]


def wilson(scores: Sequence[float]) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a mean score.

    For scores of 0 or 1 it is the usual one of a share; scores between them vary less, and it is then too wide.
    """
    count, share = len(scores), mean(scores)
    centre = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * (share * (1 - share) / count + (_Z / (2 * count)) ** 2) ** 0.5
    return max(centre - half, 0.0), min(centre + half, 1.0)


def bootstrap(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean of paired differences, by drawing the pairs again, with a fixed seed."""
    draw, count = Random(0), len(differences)
    means = sorted(sum(draw.choices(differences, k=count)) / count for _ in range(_RESAMPLES))
    return means[round(0.025 * (_RESAMPLES - 1))], means[round(0.975 * (_RESAMPLES - 1))]
