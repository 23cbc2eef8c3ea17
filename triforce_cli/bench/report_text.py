"""A report as text: what ran, its tables, and what makes its numbers doubtful."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rich.text import Text

from offload.units import counted

from ..output.format import accepted, duration, milliseconds, percent
from ..output.tables import SEPARATOR, Column, lines_text, table
from .axes import BATCH
from .compared import BASE, EXACT
from .ladder import DIFFERENT, EQUAL, TIE, same_answers, verdict_text
from .report import (
    ACCEPTANCE,
    ACCEPTED,
    BATCHES,
    BENCH,
    GRID,
    LADDER,
    LARGEST_LOAD,
    LARGEST_SPREAD,
    QUALITY,
    Pivot,
    Report,
    Row,
    pivots,
    value_text,
)


class _Field(NamedTuple):
    """A column and the text of a row in it; left out where no row has the measure that it `needs`."""

    column: Column
    text: Callable[[Row], str]
    needs: str = ""


def _shown(name: str, to_text: Callable[[Any], str]) -> Callable[[Row], str]:
    return lambda row: "-" if row[name] is None else to_text(row[name])


def _speedup(row: Row) -> str:
    """Return the speed-up with its range over the rounds, such as `1.92x (1.85-2.01)`; `-` without a range."""
    if row["method"] == BASE or row["speedup"] is None or row["speedup_range"] is None:
        return "1x" if row["method"] == BASE else "-"
    low, high = row["speedup_range"]
    return f"{row['speedup']:.2f}x ({low:.2f}-{high:.2f})"


def _output(row: Row, is_base: bool, is_equal: bool, equal: str) -> str:
    if is_base or is_equal:
        return "" if is_base else equal
    why = {True: " (a tie)", False: " (no tie)", None: ""}[row["lossless"]]
    return f"differs at token {row['differs_at']}{why}"


def _mib(name: str) -> Callable[[Row], str]:
    return _shown(name, lambda size: f"{size / 2**20:,.1f}")


_METHOD = _Field(Column("method", style="cyan"), lambda row: row["method"])
_RATE = _Field(Column("tokens/s", right=True), _shown("tokens_per_s", "{:.2f}".format))
_FIELDS = {
    BENCH: (
        _METHOD,
        _Field(Column("TTFT", right=True, dropped=5), _shown("ttft_s", duration)),
        _Field(Column("TBT ms", right=True, dropped=4), _shown("tbt_median_s", milliseconds)),
        _Field(Column("p95", right=True, dropped=7), _shown("tbt_p95_s", milliseconds)),
        _RATE,
        _Field(Column("speedup", right=True, style="bold"), _speedup),
        _Field(
            Column("acceptance\n(of drafted)", dropped=3, style="green"),
            lambda row: "\n".join(accepted(row[ACCEPTANCE], row[ACCEPTED], unit="")) or "-",
        ),
        _Field(
            Column("tokens/\nverification", right=True, dropped=6), _shown("tokens_per_verification", "{:.2f}".format)
        ),
        _Field(Column("tree\nnodes", right=True, dropped=1), _shown("nodes", "{:.0f}".format), "nodes"),
        _Field(
            Column("mask us a\ntoken, row", right=True, dropped=9),
            _shown("mask_s", lambda by: f"{by['token'] * 1e6:,.0f}, {by['row'] * 1e6:,.0f}"),
            "mask_s",
        ),
        _Field(Column("memory\nMiB", right=True, dropped=8), _mib("memory_bytes")),
        _Field(
            Column("output", dropped=2, least=8),
            lambda row: _output(row, row["method"] == BASE, row["equals_ar"], "as ar"),
            "equals_ar",
        ),
    ),
    BATCHES: (
        _METHOD,
        _Field(Column("batch", right=True), lambda row: str(row["batch"])),
        _RATE,
        _Field(Column("ratio", right=True, style="bold"), _shown("ratio", "{:.2f}x".format)),
        _Field(Column("ms/token", right=True, dropped=2), _shown("token_s", milliseconds)),
        _Field(Column("total", right=True, dropped=3), _shown("total_s", duration)),
        _Field(
            Column("output", dropped=1, least=8),
            lambda row: _output(row, row["batch"] == 1, row["equals_alone"], "as alone"),
            "equals_alone",
        ),
    ),
    LADDER: (
        _Field(Column("tokens", right=True), lambda row: f"{row['filled']:,}"),
        _Field(Column("output", dropped=9), lambda row: row["output"]),
        _Field(Column("T", right=True), lambda row: f"{row['temperature']:g}"),
        _METHOD,
        _Field(Column("drafter", dropped=2), lambda row: row["drafter"]),
        _RATE,
        _Field(Column("speedup", right=True, style="bold"), _shown("speedup", "{:.2f}x".format)),
        _Field(Column("tokens/\npass", right=True, dropped=8), _shown("tokens_per_verification", "{:.2f}".format)),
        _Field(
            Column("accepted", dropped=3, style="green"), lambda row: "\n".join(accepted(row[ACCEPTANCE], {})) or "-"
        ),
        _Field(Column("TTFT", right=True, dropped=4), _shown("ttft_s", duration)),
        _Field(Column("MiB", right=True, dropped=5), _mib("memory_bytes")),
        _Field(Column("as ar", dropped=7), verdict_text),
    ),
    QUALITY: (
        _Field(Column("mode", style="cyan"), lambda row: row["mode"]),
        _Field(Column("perplexity", right=True, style="bold"), _shown("perplexity", "{:.3f}".format)),
        _Field(Column("KL", right=True, dropped=3), _shown("kl", "{:.4f}".format)),
        _Field(Column("same\ntop-1", right=True, dropped=4), _shown("top1_agreement", percent)),
        _Field(
            Column("equal\ntokens", right=True, dropped=5),
            lambda row: "-" if row["equal_tokens"] is None else f"{row['equal_tokens']} of {len(row['output'])}",
        ),
        _Field(
            Column("needles\nfound", right=True, dropped=1),
            lambda row: "-" if row["needles_found"] is None else f"{row['needles_found']} of {len(row['needles'])}",
        ),
        _Field(Column("needle\nlog-prob", right=True, dropped=2), _shown("needle_log_prob", "{:.2f}".format)),
        _Field(Column("ms a\ntoken", right=True, dropped=6), _shown("token_s", milliseconds)),
        _Field(Column("KV\nMiB", right=True, dropped=7), _mib("kv_bytes")),
        _Field(Column("weights\nMiB", right=True, dropped=8), _mib("weights_bytes")),
    ),
}


def title(facts: Mapping[str, Any]) -> str:
    """Return machine and request, in one line."""
    machine, settings = facts["machine"], facts["settings"]
    parts = [machine["name"], counted(machine["threads"], "thread"), machine["engine"], facts["model"]]
    if "prompts" in facts:
        lengths = sorted({prompt["tokens"] for prompt in facts["prompts"]})
        up_to = "up to " * (len(lengths) > 1)
        parts.append(f"{counted(len(facts['prompts']), 'prompt')} of {up_to}{lengths[-1]:,} tokens")
    elif "prompt_tokens" in facts:
        parts.append(counted(facts["prompt_tokens"], "prompt token"))
    else:
        parts += [counted(facts["text_tokens"], "token"), f"the last {facts['scored_tokens']:,} scored", "greedy"]
        return SEPARATOR.join(parts)
    if (facts.get(BATCH) or 1) > 1:
        parts.append(f"batches of {facts[BATCH]}")
    if facts["new_tokens"] is not None:
        parts.append(counted(facts["new_tokens"], "new token"))
    if settings["temperature"] is not None:
        parts.append(f"temperature {settings['temperature']:g}")
    return SEPARATOR.join([*parts, counted(facts["repeats"], "repeat")])


def report_text(report: Report, width: int | None) -> Text:
    """Return the title, the tables and the notes, in `width` columns; None for as many as they need."""
    parts = [lines_text([title(report.facts)], width)]
    if report.kind == GRID:
        for pivot in pivots(report):
            parts.append(lines_text([pivot.title], width, "bold").append_text(_pivoted(report, pivot, width)))
    else:
        kept = [
            each
            for each in _FIELDS[report.kind]
            if not each.needs or any(row[each.needs] is not None for row in report.rows)
        ]
        cells = [[each.text(row) for each in kept] for row in report.rows]
        parts.append(table([each.column for each in kept], cells, width))
    if report.kind == LADDER:
        parts.append(lines_text(["the same answer as plain decoding"], width, "bold").append_text(_same(report, width)))
    found = list(notes(report))
    return Text("\n").join([*parts, *([lines_text(found, width, "yellow")] if found else [])])


def _same(report: Report, width: int | None) -> Text:
    """Return the table of what `--verify` would say of each answer."""
    heads = ("method", "context", EQUAL, TIE, DIFFERENT, "largest margin")
    columns = [Column(name, right=number > 0, style="" if number else "cyan") for number, name in enumerate(heads)]
    rows = [[same_text(row[head]) for head in (*heads[:-1], "margin")] for row in same_answers(report.rows)]
    return table(columns, rows, width)


def same_text(value: Any) -> str:
    """Return a cell of the table of same answers."""
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else value_text(value)


def _pivoted(report: Report, pivot: Pivot, width: int | None) -> Text:
    """Return one table; in a narrow terminal, later columns of values are left out first."""
    values = max(len(report.axes[list(report.axes)[-1]]) if report.axes else 1, 1)
    texts = len(pivot.heads) - values
    columns = [Column(name, style="cyan" if number == 0 else "") for number, name in enumerate(pivot.heads[:texts])]
    columns += [Column(name, right=True, dropped=number) for number, name in enumerate(pivot.heads[texts:])]
    return table(columns, pivot.rows, width)


def notes(report: Report) -> Iterator[str]:
    """Yield a line for each thing that a reader should know, above all for each reason to doubt the numbers."""
    rows = report.rows
    if report.kind == QUALITY:
        yield from _quality_notes(report)
    else:
        yield from _speed_notes(report)
    yield from dict.fromkeys(
        f"{row['method']} failed at {row['context']:,} tokens: {row['error']}" for row in rows if row.get("error")
    )
    wrong = [
        row["method"]
        for row in rows
        if not row.get("is_peer") and row.get("equals_ar") is False and row["lossless"] is False
    ]
    if wrong:
        yield f"other output than ar's, not by rounding: {', '.join(dict.fromkeys(wrong))}"
    if report.other_load is not None and report.other_load > LARGEST_LOAD:
        yield f"other load: other processes used {report.other_load:.1f} cores while these runs were measured"


def _speed_notes(report: Report) -> Iterator[str]:
    rows = report.rows
    if any(row.get("prompts", 1) > 1 for row in rows):
        yield "±: standard deviation over the prompts"
    if report.kind == BATCHES and any(row["tokens_per_s"] is None for row in rows):
        yield "-: the first sequence had ended before the last one began; give more tokens with --new"
    is_timed = any(row.get("tokens_per_s") for row in rows)
    if is_timed and all(row.get("prompts", 1) == row["repeats"] == 1 for row in rows):
        so = ", so no speedup is shown" if report.kind == BENCH else ""
        more = ", or several prompts" if report.kind == GRID else ""
        yield f"one run of each has no spread{so}: use --repeats 3 or more{more}"
    noisy: dict[str, float] = {}
    for row in rows:
        if (row.get("spread") or 0) > LARGEST_SPREAD:
            noisy[row["method"]] = max(row["spread"], noisy.get(row["method"], 0))
    if noisy:
        found = ", ".join(f"{method} {percent(each)}" for method, each in noisy.items())
        yield f"noisy: tokens/s differ between the runs of a method by more than {percent(LARGEST_SPREAD)} ({found})"


def _quality_notes(report: Report) -> Iterator[str]:
    first = report.rows[0]
    found = first["needles_found"]
    if first["mode"] == EXACT and found is not None and found < len(first["needles"]):
        yield "the model itself does not find every needle here: compare the log-probabilities"
    if first["needle_log_prob_absent"] is not None:
        absent = f"{first['needle_log_prob_absent']:.2f} ({first['mode']})"
        yield f"where the text has no needle, the log-probability is {absent}"
    left_out = report.facts["left_out"]
    kinds: dict[str, list[str]] = {}
    for mode in left_out:
        kinds.setdefault(mode.partition("=")[0], []).append(mode)
    for modes in kinds.values():
        yield f"left out: {', '.join(modes)} ({left_out[modes[0]]})"
