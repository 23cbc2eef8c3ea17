"""The scores of an evaluation: by task and mode with intervals, and by length and depth; as JSON and CSV."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from statistics import mean
from typing import Any

from offload.errors import TriforceError

from ..bench.cells import Record
from ..bench.compared import EXACT
from ..output.format import rounded
from .intervals import bootstrap, wilson
from .request import EvaluateRequest

ALL = "all"  # the row of all tasks
_COLUMNS = ("mode", "task", "length", "depth", "seed", "prompt_tokens", "score", "seconds", "answers", "output")


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
