"""A grid's report as text: what ran, a pivoted table for each measure, and what makes its numbers doubtful."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from offload.units import counted

from ...output.cursor import visible
from ...output.format import percent
from ...output.tables import Column, table
from ...output.wrapping import SEPARATOR, wrapped
from ..noise import LARGEST_LOAD, LARGEST_SPREAD
from .axes import BATCH
from .pivot import Pivot, pivots
from .report import GridReport


def title(facts: Mapping[str, Any]) -> str:
    """Return machine and request, in one line."""
    machine, settings, prompts = facts["machine"], facts["settings"], facts["prompts"]
    parts = [machine["name"], counted(machine["threads"], "thread"), machine["engine"], facts["model"]]
    lengths = sorted({prompt["tokens"] for prompt in prompts})
    parts.append(f"{counted(len(prompts), 'prompt')} of {'up to ' * (len(lengths) > 1)}{lengths[-1]:,} tokens")
    if (facts.get(BATCH) or 1) > 1:
        parts.append(f"batches of {facts[BATCH]}")
    if facts["new_tokens"] is not None:
        parts.append(counted(facts["new_tokens"], "new token"))
    if settings["temperature"] is not None:
        parts.append(f"temperature {settings['temperature']:g}")
    return SEPARATOR.join([*parts, counted(facts["repeats"], "repeat")])


def report_text(report: GridReport, width: int | None) -> Text:
    """Return the title, the tables and the doubts, in `width` columns; None for as many as they need."""
    parts = [_lines([title(report.facts)], width)]
    for pivot in pivots(report):
        heading = _lines([pivot.title], width, "bold")
        parts.append(heading.append_text(_table(report, pivot, width)))
    found = list(doubts(report))
    return Text("\n").join([*parts, *([_lines(found, width, "yellow")] if found else [])])


def _table(report: GridReport, pivot: Pivot, width: int | None) -> Text:
    """Return one table; in a narrow terminal, later columns of values are left out first."""
    values = max(len(report.axes[list(report.axes)[-1]]) if report.axes else 1, 1)
    texts = len(pivot.heads) - values
    columns = [Column(name, style="cyan" if number == 0 else "") for number, name in enumerate(pivot.heads[:texts])]
    columns += [Column(name, right=True, dropped=number) for number, name in enumerate(pivot.heads[texts:])]
    return table(columns, pivot.rows, width)


def _lines(texts: list[str], width: int | None, style: str = "") -> Text:
    lines = [line for text in texts for line in ([text] if width is None else wrapped(visible(text), width))]
    return Text("".join(f"{line}\n" for line in lines), style=style)


def doubts(report: GridReport) -> Iterator[str]:
    """Yield a line for each reason to doubt the numbers."""
    rows = report.rows()
    if any(row["prompts"] > 1 for row in rows):
        yield "±: standard deviation over the prompts"
    is_timed = any(row.get("tokens_per_s") for row in rows)
    if is_timed and all(row["prompts"] == row["repeats"] == 1 for row in rows):
        yield "one run of each has no spread: use --repeats 3 or more, or several prompts"
    noisy = [row["spread"] for row in rows if (row["spread"] or 0) > LARGEST_SPREAD]
    if noisy:
        yield f"noisy: tokens/s differ between the runs of a cell by up to {percent(max(noisy))}"
    wrong = list(dict.fromkeys(row["method"] for row in rows if row["equals_ar"] is False and row["lossless"] is False))
    if wrong:
        yield f"other output than ar's, not by rounding: {', '.join(wrong)}"
    if report.other_load is not None and report.other_load > LARGEST_LOAD:
        yield f"other load: other processes used {report.other_load:.1f} cores while these runs were measured"
