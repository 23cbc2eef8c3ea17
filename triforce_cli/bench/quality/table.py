"""The report of `bench --quality` as text: what ran, a table of the modes, and what limits its meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from offload.units import counted

from ...output.cursor import visible
from ...output.format import milliseconds, percent
from ...output.tables import Column, table
from ...output.wrapping import SEPARATOR, wrapped
from .report import QualityReport

_COLUMNS = (
    Column("mode", style="cyan"),
    Column("perplexity", right=True, style="bold"),
    Column("KL", right=True, dropped=3),
    Column("same\ntop-1", right=True, dropped=4),
    Column("equal\ntokens", right=True, dropped=5),
    Column("needles\nfound", right=True, dropped=1),
    Column("needle\nlog-prob", right=True, dropped=2),
    Column("ms a\ntoken", right=True, dropped=6),
    Column("KV\nMiB", right=True, dropped=7),
    Column("weights\nMiB", right=True, dropped=8),
)


def title(report: QualityReport) -> str:
    """Return machine and request, in one line."""
    facts, machine = report.facts, report.facts["machine"]
    parts = [machine["name"], counted(machine["threads"], "thread"), machine["engine"], facts["model"]]
    parts += [counted(facts["text_tokens"], "token"), f"the last {facts['scored_tokens']:,} scored", "greedy"]
    return SEPARATOR.join(parts)


def report_text(report: QualityReport, width: int | None) -> Text:
    """Return the title, the table and its notes, in `width` columns; None for as many as they need."""
    rows = report.rows()
    notes = list(_notes(report, rows))
    parts = [_lines([title(report)], width), table(_COLUMNS, [_cells(row, report.facts) for row in rows], width)]
    return Text("\n").join([*parts, *([_lines(notes, width, "yellow")] if notes else [])])


def _lines(texts: Sequence[str], width: int | None, style: str = "") -> Text:
    lines = [line for text in texts for line in ([text] if width is None else wrapped(visible(text), width))]
    return Text("".join(f"{line}\n" for line in lines), style=style)


def _cells(row: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    found, log_prob = row["needles_found"], row["needle_log_prob"]
    return [
        row["mode"],
        f"{row['perplexity']:.3f}",
        f"{row['kl']:.4f}",
        percent(row["top1_agreement"]),
        f"{row['equal_tokens']} of {facts['new_tokens']}",
        "-" if found is None else f"{found} of {len(row['needles'])}",
        "-" if log_prob is None else f"{log_prob:.2f}",
        milliseconds(row["token_s"]),
        f"{row['kv_bytes'] / 2**20:,.1f}",
        f"{row['weights_bytes'] / 2**20:,.1f}",
    ]


def _notes(report: QualityReport, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each thing that a reader of the table should know."""
    if not rows:
        return
    exact = rows[0]
    if exact["needles_found"] is not None and exact["needles_found"] < len(exact["needles"]):
        yield "the model itself does not find every needle here: compare the log-probabilities"
    if exact["needle_log_prob_absent"] is not None:
        yield f"where the text has no needle, the log-probability is {exact['needle_log_prob_absent']:.2f} (exact)"
    kinds: dict[str, list[str]] = {}
    for mode in report.facts["left_out"]:
        kinds.setdefault(mode.partition("=")[0], []).append(mode)
    for modes in kinds.values():
        yield f"left out: {', '.join(modes)} ({report.facts['left_out'][modes[0]]})"
