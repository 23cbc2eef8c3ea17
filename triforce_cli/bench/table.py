"""A benchmark's report as text: what ran, a table of the methods, and what makes its numbers doubtful."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from offload.units import GIB, counted

from ..output.cursor import visible
from ..output.format import accepted, duration, milliseconds, percent
from ..output.tables import Column, table
from ..output.wrapping import SEPARATOR, wrapped
from .methods import BASE
from .noise import LARGEST_LOAD, LARGEST_SPREAD
from .report import Comparison

_COLUMNS = (
    Column("method", style="cyan"),
    Column("TTFT", right=True, dropped=5),
    Column("TBT ms", right=True, dropped=4),
    Column("p95", right=True, dropped=7),
    Column("tokens/s", right=True),
    Column("speedup", right=True, style="bold"),
    Column("acceptance", dropped=3, style="green"),
    Column("tokens/\nverification", right=True, dropped=6),
    Column("memory\nMiB", right=True, dropped=8),
)
_NODES = Column("tree\nnodes", right=True, dropped=1)  # stands before the memory
_OUTPUT = Column("output", dropped=2, least=8)


def title(facts: Mapping[str, Any]) -> str:
    """Return machine and request, in one line."""
    machine = facts["machine"]
    parts = [machine["name"], counted(machine["threads"], "thread"), machine["engine"], facts["model"]]
    parts += [counted(facts["prompt_tokens"], "prompt token"), counted(facts["new_tokens"], "new token")]
    parts += [f"temperature {facts['settings']['temperature']:g}", counted(facts["repeats"], "repeat")]
    return SEPARATOR.join(parts)


def report_text(comparison: Comparison, width: int | None) -> Text:
    """Return the title, the table and the doubts, in `width` columns; None for as many as they need."""
    rows = comparison.rows()
    has_trees = any(row["nodes"] is not None for row in rows)
    columns = [*_COLUMNS[:-1], *([_NODES] if has_trees else []), _COLUMNS[-1]]
    columns += [_OUTPUT] if comparison.comparable else []
    cells = [_cells(row, comparison.comparable, has_trees) for row in rows]
    doubts = _lines(list(_doubts(rows, comparison.other_load)), width, "yellow")
    parts = [_lines([title(comparison.facts)], width), table(columns, cells, width), *([doubts] if doubts else [])]
    return Text("\n").join(parts)


def _lines(texts: list[str], width: int | None, style: str = "") -> Text:
    lines = [line for text in texts for line in ([text] if width is None else wrapped(visible(text), width))]
    return Text("".join(f"{line}\n" for line in lines), style=style)


def _doubts(rows: list[dict[str, Any]], other_load: float | None) -> Iterator[str]:
    """Yield a line for each reason to doubt the numbers."""
    if rows and all(row["repeats"] == 1 for row in rows):
        yield "one run has no spread, so no speedup is shown: use --repeats 3 or more"
    noisy = [f"{row['method']} {percent(row['spread'])}" for row in rows if (row["spread"] or 0) > LARGEST_SPREAD]
    if noisy:
        yield f"noisy: tokens/s differ between the runs of a method by more than 10 % ({', '.join(noisy)})"
    if other_load is not None and other_load > LARGEST_LOAD:
        yield f"other load: other processes used {other_load:.1f} cores meanwhile"


def _cells(row: Mapping[str, Any], comparable: bool, has_trees: bool) -> list[str]:
    def shown(name: str, to_text: Any) -> str:
        return "-" if row[name] is None else to_text(row[name])

    cells = [
        row["method"],
        shown("ttft_s", duration),
        shown("tbt_median_s", milliseconds),
        shown("tbt_p95_s", milliseconds),
        shown("tokens_per_s", "{:.2f}".format),
        _speedup(row),
        "\n".join(accepted(row["acceptance"])) or "-",
        shown("tokens_per_verification", "{:.2f}".format),
        *([shown("nodes", "{:.0f}".format)] if has_trees else []),
        f"{row['memory_bytes'] / GIB * 1024:,.1f}",
    ]
    if comparable:
        cells.append("" if row["method"] == BASE else _output(row))
    return cells


def _speedup(row: Mapping[str, Any]) -> str:
    """Return the speed-up with its range over the rounds, such as `1.92x (1.85-2.01)`; `-` without a range."""
    if row["method"] == BASE or row["speedup"] is None or row["speedup_range"] is None:
        return "1x" if row["method"] == BASE else "-"
    low, high = row["speedup_range"]
    return f"{row['speedup']:.2f}x ({low:.2f}-{high:.2f})"


def _output(row: Mapping[str, Any]) -> str:
    if row["equals_ar"]:
        return "as ar"
    why = {True: " (a tie)", False: " (no tie)", None: ""}[row["lossless"]]
    return f"differs at token {row['differs_at']}{why}"
