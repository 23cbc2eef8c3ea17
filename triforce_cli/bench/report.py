"""The report of a benchmark: a row for each method, context and temperature; as JSON and as one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from offload.metrics import Summary
from offload.units import counted

from ..output.format import accepted, duration, milliseconds, rounded
from ..output.tables import SEPARATOR, Column, lines_text, table
from ..run.processor import processor
from .methods import BASE

if TYPE_CHECKING:
    import torch

LARGEST_SPREAD = 0.10  # of the rates of a method's runs; above, a note says so
_MEDIANS = ("tbt_median_s", "tbt_p95_s", "tokens_per_s", "tokens_per_verification")
_BY_PAIR = ("acceptance", "accepted_of_drafted", "time_share")


class Cell(NamedTuple):
    """A row: tokens of the prompt, temperature and method."""

    context: int
    temperature: float
    method: str


@dataclass(frozen=True, slots=True)
class Run:
    """One generation. `differs_at`, `lossless` and `margin` compare it with plain decoding's output."""

    summary: Summary
    tokens: list[int]
    ttft_s: float
    seconds: float
    memory_bytes: int
    differs_at: int | None
    lossless: bool | None
    margin: float | None


@dataclass(slots=True)
class Report:
    """What was measured: the machine and the request, and the runs of each cell."""

    facts: Mapping[str, Any]
    cells: dict[Cell, list[Run]] = field(default_factory=dict)
    interrupted: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return everything. The settings have all their digits."""
        found = rounded({**self.facts, "rows": self.rows()})
        return {"type": "bench", "interrupted": self.interrupted} | found | {"settings": self.facts["settings"]}

    def rows(self) -> list[dict[str, Any]]:
        """Return the measures of each cell, medians over its runs."""
        return [self._row(cell, runs) for cell, runs in self.cells.items()]

    def _row(self, cell: Cell, runs: Sequence[Run]) -> dict[str, Any]:
        summaries = [run.summary for run in runs]
        rates = [each.tokens_per_s for each in summaries if each.tokens_per_s]
        ratios = self._ratios(cell, runs)
        row: dict[str, Any] = cell._asdict() | {"ttft_s": median(run.ttft_s for run in runs)}
        row |= {name: _median([getattr(each, name) for each in summaries]) for name in _MEDIANS}
        row |= {"speedup": median(ratios) if ratios else None, "speedups": ratios}
        row |= {"spread": (max(rates) - min(rates)) / median(rates) if len(rates) > 1 else None}
        row |= {name: _by_key([getattr(each, name) for each in summaries]) for name in _BY_PAIR}
        row |= {"verifications": _median([each.verifications for each in summaries])}
        differing = [run for run in runs if run.differs_at is not None]
        row |= {"differs_at": min((run.differs_at for run in differing if run.differs_at is not None), default=None)}
        row |= {"lossless": all(run.lossless for run in differing) if differing else None}
        row |= {"margin": max((run.margin for run in differing if run.margin is not None), default=None)}
        row |= {"memory_bytes": runs[0].memory_bytes, "tokens": runs[0].tokens}
        row["runs"] = [{"tokens_per_s": run.summary.tokens_per_s, "total_s": run.seconds} for run in runs]
        return row

    def _ratios(self, cell: Cell, runs: Sequence[Run]) -> list[float]:
        """Return each run's rate over that of plain decoding in the same round."""
        plain = self.cells.get(cell._replace(method=BASE), [])
        pairs = [(run.summary.tokens_per_s, base.summary.tokens_per_s) for run, base in zip(runs, plain, strict=False)]
        return [rate / base for rate, base in pairs if rate and base]


def _median(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None


def _by_key(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: median(part[key] for part in parts if key in part) for key in keys}


def provenance(device: torch.device, engine: str) -> dict[str, Any]:
    """Return the version, the date and the machine, whose `engine` is described in text."""
    import torch

    machine = {"name": processor(device), "threads": torch.get_num_threads(), "engine": engine}
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"triforce": version("triforce"), "date": date, "machine": machine | {"torch": torch.__version__}}


def shown(name: str, to_text: Callable[[Any], str]) -> Callable[[Mapping[str, Any]], str]:
    """Return the text of a row's measure; `-` where it has none."""
    return lambda row: "-" if row[name] is None else to_text(row[name])


def _speedup(row: Mapping[str, Any]) -> str:
    """Return the speed-up with its range over the rounds, such as `1.92x (1.85-2.01)`."""
    if row["method"] == BASE or row["speedup"] is None:
        return "1x" if row["method"] == BASE else "-"
    low, high = min(row["speedups"]), max(row["speedups"])
    return f"{row['speedup']:.2f}x" + (f" ({low:.2f}-{high:.2f})" if len(row["speedups"]) > 1 else "")


def _output(row: Mapping[str, Any]) -> str:
    if row["differs_at"] is None:
        return ""
    return f"differs at token {row['differs_at']} ({'a' if row['lossless'] else 'no'} tie)"


_COLUMNS: tuple[tuple[Column, Callable[[Mapping[str, Any]], str]], ...] = (
    (Column("context", right=True), lambda row: f"{row['context']:,}"),
    (Column("T", right=True), lambda row: f"{row['temperature']:g}"),
    (Column("method", style="cyan"), lambda row: row["method"]),
    (Column("TTFT", right=True, dropped=5), shown("ttft_s", duration)),
    (Column("ms a\ntoken", right=True, dropped=4), shown("tbt_median_s", milliseconds)),
    (Column("p95", right=True, dropped=7), shown("tbt_p95_s", milliseconds)),
    (Column("tokens/s", right=True), shown("tokens_per_s", "{:.2f}".format)),
    (Column("speedup", right=True, style="bold"), _speedup),
    (
        Column("acceptance\n(of drafted)", dropped=3, style="green"),
        lambda row: "\n".join(accepted(row["acceptance"], row["accepted_of_drafted"], unit="")) or "-",
    ),
    (
        Column("tokens/\nverification", right=True, dropped=6),
        shown("tokens_per_verification", "{:.2f}".format),
    ),
    (Column("MiB", right=True, dropped=8), shown("memory_bytes", lambda size: f"{size / 2**20:,.1f}")),
    (Column("output", dropped=2, least=8), _output),
)


def report_text(report: Report, width: int | None) -> Text:
    """Return the machine and the request, the table, and what makes its numbers doubtful."""
    facts, rows = report.facts, report.rows()
    found = Text("\n").join([lines_text([title(facts, counted(facts["repeats"], "repeat"))], width)])
    has_output = any(row["differs_at"] is not None for row in rows)
    columns = [each for each in _COLUMNS if has_output or each[1] is not _output]
    found.append("\n")
    found.append_text(table([column for column, _ in columns], [[to(row) for _, to in columns] for row in rows], width))
    return found.append_text(lines_text(_notes(rows), width, "dim"))


def title(facts: Mapping[str, Any], more: str) -> str:
    """Return machine and request, in one line."""
    machine = facts["machine"]
    parts = [machine["name"], counted(machine["threads"], "thread"), machine["engine"], facts["model"]]
    return SEPARATOR.join([*parts, f"{facts['new_tokens']:,} new tokens", more])


def _notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    spread = max((row["spread"] for row in rows if row["spread"] is not None), default=0.0)
    if spread > LARGEST_SPREAD:
        return [f"the runs of one method differ by up to {spread:.0%}: compare ratios, or use more --repeats"]
    return []
