"""The report of `bench --batch`: medians of the runs, as rows, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.text import Text

from ..output.cursor import visible
from ..output.format import duration, milliseconds, rounded
from ..output.tables import Column, table
from ..output.wrapping import wrapped
from .report import first_difference
from .table import title

Outputs = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class BatchSample:
    """One run of a batch.

    Args:
        tokens, seconds: what all sequences decoded while all of them decoded. One after the other: the sums.
        total_s: from the first prompt to the last token, reading included.
        outputs: the token ids of each sequence.
    """

    tokens: int
    seconds: float
    total_s: float
    outputs: Outputs

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None


@dataclass(slots=True)
class BatchRuns:
    """The runs of a method with `size` sequences together."""

    method: str
    size: int
    samples: list[BatchSample] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float | None:
        """The median over the runs that have a rate."""
        rates = [sample.tokens_per_s for sample in self.samples if sample.tokens_per_s]
        return median(rates) if rates else None

    def differs_at(self, expected: Outputs) -> int | None:
        """Return the first token, from 0, in which any sequence differs from that of batch 1; None if none does."""
        pairs = [zip(sample.outputs, expected, strict=False) for sample in self.samples]
        found = [first_difference(one, other) for each in pairs for one, other in each]
        return min((position for position in found if position is not None), default=None)


@dataclass(frozen=True, slots=True)
class BatchComparison:
    """All runs; those of a method follow each other, with batch 1 first.

    Outputs are compared only if they are `comparable`: greedy or by coupled sampling.
    """

    facts: Mapping[str, Any]
    comparable: bool
    runs: Sequence[BatchRuns]
    other_load: float | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each method and batch; `ratio` is relative to the same method's batch 1."""
        first = {each.method: each for each in self.runs if each.size == 1}
        return [self._row(each, first[each.method]) for each in self.runs if each.samples]

    def _row(self, runs: BatchRuns, alone: BatchRuns) -> dict[str, Any]:
        rate, base = runs.tokens_per_s, alone.tokens_per_s
        differs_at = runs.differs_at(alone.samples[0].outputs) if self.comparable else None
        return {
            "method": runs.method,
            "batch": runs.size,
            "repeats": len(runs.samples),
            "tokens_per_s": rate,
            "ratio": rate / base if rate and base else None,
            "token_s": runs.size / rate if rate else None,
            "total_s": median(sample.total_s for sample in runs.samples),
            "equals_alone": differs_at is None if self.comparable else None,
            "differs_at": differs_at,
        }

    def as_json(self, interrupted: bool) -> dict[str, Any]:
        """Return everything, with the raw samples."""
        by_row = {(each.method, each.size): each.samples for each in self.runs}
        rows = [row | {"runs": list(map(_raw, by_row[row["method"], row["batch"]]))} for row in self.rows()]
        found = self.facts | {"other_load_cores": self.other_load, "batches": rows}
        return {"type": "bench_batch", "interrupted": interrupted, **rounded(found), "settings": self.facts["settings"]}


def _raw(sample: BatchSample) -> dict[str, Any]:
    times = {"tokens_per_s": sample.tokens_per_s, "seconds": sample.seconds, "total_s": sample.total_s}
    return times | {"outputs": [list(each) for each in sample.outputs]}


_COLUMNS = (
    Column("method", style="cyan"),
    Column("batch", right=True),
    Column("tokens/s", right=True),
    Column("ratio", right=True, style="bold"),
    Column("ms/token", right=True, dropped=2),
    Column("total", right=True, dropped=3),
    Column("output", dropped=1, least=8),
)


def report_text(comparison: BatchComparison, width: int | None) -> Text:
    """Return the title and the table, in `width` columns; None for as many as they need."""
    rows = comparison.rows()
    parts = [_lines(title(comparison.facts), width), table(_COLUMNS, list(map(_cells, rows)), width)]
    if any(row["tokens_per_s"] is None for row in rows):
        note = "-: the first sequence had ended before the last one began; give more tokens with --new"
        parts.append(_lines(note, width))
    return Text("\n").join(parts)


def _lines(text: str, width: int | None) -> Text:
    lines = [text] if width is None else wrapped(visible(text), width)
    return Text("".join(f"{line}\n" for line in lines))


def _cells(row: Mapping[str, Any]) -> list[str]:
    rate, ratio, token_s = row["tokens_per_s"], row["ratio"], row["token_s"]
    return [
        row["method"],
        str(row["batch"]),
        "-" if rate is None else f"{rate:.2f}",
        "-" if ratio is None else f"{ratio:.2f}x",
        "-" if token_s is None else milliseconds(token_s),
        duration(row["total_s"]),
        _output(row),
    ]


def _output(row: Mapping[str, Any]) -> str:
    if row["batch"] == 1:
        return ""
    return {True: "as alone", False: f"differs at token {row['differs_at']}", None: "-"}[row["equals_alone"]]
