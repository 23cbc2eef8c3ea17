"""The report of a grid: medians over repeats, mean and spread over prompts. Imports neither engine nor terminal."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from statistics import mean, median, stdev
from typing import Any

from ...output.format import rounded
from ..noise import spread
from .axes import BATCH, CONTEXT
from .records import Cell, Record

MEASURES = ("tokens_per_s", "speedup", "tokens_per_verification", "tbt_median_s")
ACCEPTANCE = "acceptance"


@dataclass(frozen=True, slots=True)
class GridReport:
    """The finished runs of a grid.

    Args:
        facts: the machine and the request.
        axes: the values of the settings that vary, with the context if it does.
        cells: all that the grid has, done or not.
        base: of each cell, that of plain decoding under the same conditions.
        records: the finished runs of each cell that has some, by repeat.
    """

    facts: Mapping[str, Any]
    axes: Mapping[str, Sequence[Any]]
    cells: Sequence[Cell]
    base: Mapping[Cell, Cell]
    records: Mapping[Cell, Sequence[Record]]

    @property
    def other_load(self) -> float | None:
        """Return the cores that other processes used in the mean of the runs; None where it was not measured."""
        records = [record for runs in self.records.values() for record in runs]
        found = [load for record in records if (load := record.get("other_load_cores")) is not None]
        return mean(found) if found else None

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of numbers for each method and point that has run.

        Each measure is the mean over the prompts of the median over the repeats; `_sd` is the standard deviation over
        the prompts, None for one prompt. `speedup` is relative to plain decoding of the same prompt.
        """
        groups = dict.fromkeys(cell.group for cell in self.cells)
        for cell in self.cells:
            groups[cell.group] = [*(groups[cell.group] or []), cell]
        return [row for cells in groups.values() if (row := self._row(cells)) is not None]

    def _row(self, cells: Sequence[Cell]) -> dict[str, Any] | None:
        done = [cell for cell in cells if self.records.get(cell)]
        if not done:
            return None
        row = {"method": cells[0].method} | ({CONTEXT: cells[0].context} if CONTEXT in self.axes else {})
        row |= {BATCH: cells[0].batch} if BATCH in self.axes else {}
        row |= dict(cells[0].values)
        row |= {"prompts": len(done), "repeats": min(len(self.records[cell]) for cell in done)}
        row["prompt_tokens"] = mean(self.records[cell][0]["prompt_tokens"] for cell in done)
        for name in MEASURES:
            values = [value for cell in done if (value := self._measure(cell, name)) is not None]
            row |= {name: mean(values) if values else None, f"{name}_sd": stdev(values) if len(values) > 1 else None}
        row |= self._acceptance(done)
        rates = [spread(_present(self.records[cell], "tokens_per_s")) for cell in done]
        row["spread"] = max((each for each in rates if each is not None), default=None)
        return row | self._outputs(done)

    def _measure(self, cell: Cell, name: str) -> float | None:
        if name != "speedup":
            values = _present(self.records[cell], name)
            return median(values) if values else None
        rates = [self._measure(each, "tokens_per_s") for each in (cell, self.base[cell]) if self.records.get(each)]
        return rates[0] / rates[1] if len(rates) == 2 and all(rates) else None

    def _acceptance(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """Return the acceptance of each pair of drafter and verifier: mean and standard deviation over the prompts."""
        found: dict[str, list[float]] = {}
        for cell in cells:
            runs = [run[ACCEPTANCE] for run in self.records[cell]]
            for pair in dict.fromkeys(pair for run in runs for pair in run):
                found.setdefault(pair, []).append(median(run[pair] for run in runs if pair in run))
        means = {pair: mean(values) for pair, values in found.items()}
        deviations = {pair: stdev(values) if len(values) > 1 else None for pair, values in found.items()}
        return {ACCEPTANCE: means, f"{ACCEPTANCE}_sd": deviations}

    def _outputs(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """Return whether all outputs are those of plain decoding, and if not, whether rounding alone explains it."""
        equal, lossless = [], []
        for cell in cells:
            base = self.records.get(self.base[cell])
            comparable = [run for run in self.records[cell] if run["sampling"] != "fastest"]
            equal += [run["tokens"] == base[0]["tokens"] for run in comparable if base]
            lossless += [run["lossless"] for run in comparable if run.get("lossless") is not None]
        return {"equals_ar": all(equal) if equal else None, "lossless": all(lossless) if lossless else None}

    def as_json(self, interrupted: bool) -> dict[str, Any]:
        """Return everything but the single runs, which are in the file that --points names."""
        axes = {name: list(values) for name, values in self.axes.items()}
        found = self.facts | {"other_load_cores": self.other_load, "axes": axes, "points": self.rows()}
        exact = {"settings": self.facts["settings"], "axes": axes}
        return {"type": "bench_grid", "interrupted": interrupted, **rounded(found), **exact}


def csv_text(report: GridReport) -> str:
    """Return a table with a line for each method and point; an acceptance is a column for each pair."""
    rows = report.rows()
    pairs = list(dict.fromkeys(pair for row in rows for pair in row[ACCEPTANCE]))
    flat = []
    for row in rows:
        parts = {name: value for name, value in rounded(row).items() if not name.startswith(ACCEPTANCE)}
        for pair in pairs:
            for name in (ACCEPTANCE, f"{ACCEPTANCE}_sd"):
                parts[f"{name} {pair}"] = rounded(row[name].get(pair))
        flat.append({"model": report.facts["model"]} | parts)
    text = StringIO()
    writer = csv.DictWriter(text, list(flat[0]) if flat else ["model"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _present(runs: Sequence[Record], name: str) -> list[float]:
    return [run[name] for run in runs if run[name] is not None]
