"""The report of a benchmark: medians of the samples, a table, JSON. Imports neither engine nor terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from offload.metrics import Summary
from offload.units import GIB, counted

from ..output.format import accepted, duration, milliseconds
from .methods import BASE

_COMMON = ("ttft_s", "tbt_median_s", "tbt_p95_s", "tokens_per_s", "tokens_per_verification")


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a method: its summary, the time of every token after the first, and the tokens."""

    summary: Summary
    tbt_s: Sequence[float]
    ids: tuple[int, ...]


@dataclass(slots=True)
class MethodRuns:
    """All runs of one method so far; `memory_bytes` is its KV caches and draft model, without the model's weights.

    `lossless`: whether rounding alone explains outputs that differ from plain decoding's; None if none differ.
    """

    method: str
    memory_bytes: int
    samples: list[Sample] = field(default_factory=list)
    lossless: bool | None = None

    def medians(self) -> dict[str, Any]:
        """Return the median over the runs of each number that they have."""
        found = {name: _median(getattr(sample.summary, name) for sample in self.samples) for name in _COMMON}
        for name in ("acceptance", "time_share"):
            runs = [getattr(sample.summary, name) for sample in self.samples]
            keys = dict.fromkeys(key for run in runs for key in run)
            found[name] = {key: median(run[key] for run in runs if key in run) for key in keys}
        return found

    def differs_at(self, ids: Sequence[int]) -> int | None:
        """Return the first token, counted from 0, in which any run differs from these; None if none does."""
        positions = [_first_difference(sample.ids, ids) for sample in self.samples]
        return min((position for position in positions if position is not None), default=None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs of all methods, plain decoding first. `facts` describe the machine and the request.

    Outputs are compared only if the runs are `greedy`.
    """

    facts: Mapping[str, Any]
    greedy: bool
    methods: Sequence[MethodRuns]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of numbers for each method; `speedup` is relative to plain decoding."""
        done = [one for one in self.methods if one.samples]
        base = next((one for one in done if one.method == BASE), None)
        rows = []
        for one in done:
            row = {"method": one.method, "repeats": len(one.samples)} | one.medians()
            rate, plain = row["tokens_per_s"], base and base.medians()["tokens_per_s"]
            row["speedup"] = rate / plain if rate and plain else None
            row["memory_bytes"] = one.memory_bytes
            row["differs_at"] = one.differs_at(base.samples[0].ids) if base and self.greedy else None
            row["equals_ar"] = row["differs_at"] is None if base and self.greedy else None
            row["lossless"] = one.lossless
            rows.append(row)
        return rows

    def as_json(self, interrupted: bool) -> dict[str, Any]:
        """Return everything, with the raw samples."""
        runs = {one.method: [_raw(sample) for sample in one.samples] for one in self.methods}
        methods = [row | {"runs": runs[row["method"]]} for row in self.rows()]
        return {"type": "bench", "interrupted": interrupted, **self.facts, "methods": methods}

    def title(self) -> str:
        """Return machine and request, in one line."""
        facts, machine = self.facts, self.facts["machine"]
        parts = [machine["name"], counted(machine["threads"], "thread"), machine["engine"], facts["model"]]
        parts += [counted(facts["prompt_tokens"], "prompt token"), counted(facts["new_tokens"], "new token")]
        parts += [f"temperature {facts['settings']['temperature']:g}", counted(facts["repeats"], "repeat")]
        return " · ".join(parts)

    def as_table(self, drawn: bool) -> str:
        """Return the title and a table, as wide as its numbers need; `drawn` with lines, for a terminal."""
        table = Table(box=box.SIMPLE_HEAD if drawn else None, pad_edge=False, show_edge=False)
        table.add_column("method", no_wrap=True)
        for name in ("TTFT", "TBT ms", "p95", "tokens/s", "speedup"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("acceptance", no_wrap=True)
        for name in ("tokens/\nverification", "memory\nMiB"):
            table.add_column(name, justify="right", no_wrap=True)
        if self.greedy:
            table.add_column("output", no_wrap=True)
        for row in self.rows():
            table.add_row(*_cells(row, self.greedy))
        page = Console(file=StringIO(), width=500, color_system=None, force_terminal=False, legacy_windows=False)
        page.print(table)
        lines = (line.rstrip() for line in page.file.getvalue().splitlines())
        return f"{self.title()}\n\n" + "".join(f"{line}\n" for line in lines if line)


def _cells(row: Mapping[str, Any], greedy: bool) -> list[str]:
    def shown(name: str, to_text: Any) -> str:
        return "-" if row[name] is None else to_text(row[name])

    cells = [
        row["method"],
        shown("ttft_s", duration),
        shown("tbt_median_s", milliseconds),
        shown("tbt_p95_s", milliseconds),
        shown("tokens_per_s", "{:.2f}".format),
        shown("speedup", "{:.2f}x".format),
        "\n".join(accepted(row["acceptance"])) or "-",
        shown("tokens_per_verification", "{:.2f}".format),
        f"{row['memory_bytes'] / GIB * 1024:,.1f}",
    ]
    if greedy:
        cells.append("" if row["method"] == BASE else _output(row))
    return cells


def _output(row: Mapping[str, Any]) -> str:
    if row["equals_ar"]:
        return "as ar"
    why = {True: " (a tie)", False: " (no tie)", None: ""}[row["lossless"]]
    return f"differs at token {row['differs_at']}{why}"


def _median(values: Any) -> float | None:
    present = [value for value in values if value is not None]
    return median(present) if present else None


def _first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    for position, (one, other) in enumerate(zip(ids, others, strict=False)):
        if one != other:
            return position
    return None if len(ids) == len(others) else min(len(ids), len(others))


def _raw(sample: Sample) -> dict[str, Any]:
    summary = asdict(sample.summary)
    names = (*_COMMON, "verifications", "acceptance", "time_share", "total_s")
    return {name: summary[name] for name in names} | {"tbt_s": list(sample.tbt_s), "tokens": list(sample.ids)}
