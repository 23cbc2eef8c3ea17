"""The ladder as a page of HTML that stands alone: its pictures are inside, and it loads nothing."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from ..output.format import accepted, duration
from ..output.svg import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Picture, Plot, Scale, spread
from .compared import BASE
from .ladder import DIFFERENT, EQUAL, TIE, mean_by, positions, same_answers, verdict_text
from .positions import PART
from .report import ACCEPTANCE, Report, Row
from .report_text import notes, same_text, title

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED)
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}
:root{color-scheme:light dark}
table{border-collapse:collapse;font-size:13px;margin:1em 0}
td,th{padding:.2em .7em;border-bottom:1px solid #8888;text-align:right}
td:nth-child(-n+4),th:nth-child(-n+4){text-align:left}div{display:flex;flex-wrap:wrap;gap:.5em}
svg{max-width:49%;height:auto}"""
_TOKENS = "tokens of the text"
Lines = Mapping[str, Sequence[tuple[float, float]]]


def page_text(report: Report) -> str:
    """Return the page of a ladder's report."""
    rows = report.rows
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    name = escape(report.facts["model"])
    parts = [f"<h1>{name}: decoding methods by length</h1>"]
    parts += [f"<p>{escape(each)}</p>" for each in (title(report.facts), *_conditions(report))]
    first = {"all methods": mean_by(rows, "ttft_s").get(BASE, [])} | mean_by(rows, "ttft_s", is_peer=True)
    if len(first["all methods"]) > 1:
        parts.append(f"<div>{_chart('seconds to the first token', _TOKENS, first)}</div>")
    for temperature in temperatures:
        own = [row for row in rows if row["temperature"] == temperature]
        parts += [f"<h2>Temperature {temperature:g}</h2>", "<div>", *_pictures(own), "</div>"]
    parts += ["<h2>The same answer as plain decoding</h2>", _same(rows), "<h2>All runs</h2>", _table(rows)]
    parts += [f"<p>{escape(note)}</p>" for note in notes(report)]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{name}: the ladder</title><style>{_STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _conditions(report: Report) -> Iterator[str]:
    """Yield how it was measured, so that others can compare."""
    facts, rows = report.facts, report.rows
    longest, kinds = (
        max(row["filled"] for row in rows),
        dict.fromkeys(str(row["kv"]) for row in rows if not row["is_peer"]),
    )
    yield f"triforce {facts['triforce']}, {facts['date']}, torch {facts['machine']['torch']}. KV: {', '.join(kinds)}."
    yield (
        f"Every position that was allocated was filled: the texts are real, and the longest run ends at {longest:,} "
        "tokens. Memory is an estimate of keys, values and draft models, without the model's weights."
    )
    yield (
        "Three kinds of output of each text: a summary, a quotation and the answer to a question. Speed-ups are over "
        "plain decoding (ar) of the same prompt. The time to the first token is that of reading the whole prompt."
    )
    if any(row["is_peer"] for row in rows):
        yield (
            "Other programs ran beside these in the same rounds. Their memory is the rise of their process, not an "
            "estimate; their draws at temperatures above 0 are of other random numbers, and are not compared."
        )


def _pictures(rows: Sequence[Row]) -> Iterator[str]:
    for measure, name in (("speedup", "speed-up over plain decoding"), ("tokens_per_verification", "tokens a pass")):
        lines = {method: each for method, each in mean_by(rows, measure).items() if method != BASE}
        if lines:
            yield _chart(name, _TOKENS, lines)
    for name, text, scale in (
        ("draft_positions", "accepted, by position in the draft", 1),
        ("answer_positions", "accepted, by position in the answer", PART),
    ):
        rates = positions(rows, name)
        points = {
            method: [(scale * at + 1, rate) for at, rate in enumerate(each) if rate is not None]
            for method, each in rates.items()
            if any(rate is not None for rate in each)
        }
        if points:
            yield _chart(text, "tokens", points)


def _chart(name: str, x_name: str, lines: Lines) -> str:
    """Return a picture with a line for each method, from 0 on."""
    picture = Picture(name, 640, 330)
    picture.text(24, 30, name, 15, "bold")
    right = max(max(x for x, _ in points) for points in lines.values())
    top = _round_up(max(max(y for _, y in points) for points in lines.values()))
    plot = Plot(picture, Scale(0, right, 70, 450), Scale(0, top, 270, 66))
    xs = [(x, f"{x:,}") for x in range(0, int(right) + 1, max(-(-int(right) // 4), 1))]
    plot.axes(xs, [(top * part / 4, f"{top * part / 4:.4g}") for part in range(5)], x_name, "")
    heights = spread([plot.y(points[-1][1]) for points in lines.values()], 17)
    for number, ((method, points), height) in enumerate(zip(lines.items(), heights, strict=True)):
        colour = GREY if method == BASE else _COLOURS[number % len(_COLOURS)]
        plot.line(points, colour, number >= len(_COLOURS))
        picture.box(464, height - 4, 8, 8, colour, 1)
        picture.text(478, height + 4, f"{method} {points[-1][1]:.3g}", 12)
    return picture.svg()


def _round_up(value: float) -> float:
    """Return a round top of an axis, at least the value."""
    steps = (step * 10.0**exponent for exponent in range(-6, 9) for step in (1, 2, 4, 6, 8))
    return next(step for step in steps if step >= value)


def _same(rows: Sequence[Row]) -> str:
    heads = ("method", "context", EQUAL, TIE, DIFFERENT, "margin")
    found = [[same_text(row[head]) for head in heads] for row in same_answers(rows)]
    return _html((*heads[:-1], "largest margin of logits"), found)


def _table(rows: Sequence[Row]) -> str:
    heads = ["text", "output", "method", "drafter", "T", "tokens", "tokens/s", "speed-up", "tokens a pass", "accepted"]
    return _html([*heads, "to first token", "MiB", "as ar"], [list(_cells(row)) for row in rows])


def _cells(row: Row) -> Iterator[str]:
    yield from (row[name] for name in ("text", "output", "method", "drafter"))
    yield from (f"{row['temperature']:g}", f"{row['filled']:,}")
    for name in ("tokens_per_s", "speedup", "tokens_per_verification"):
        yield "-" if row[name] is None else f"{row[name]:.2f}"
    yield "; ".join(accepted(row[ACCEPTANCE], {})) or "-"
    yield "-" if row["ttft_s"] is None else duration(row["ttft_s"])
    yield "-" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**20:,.1f}"
    margin = "" if row["margin"] is None else f" (margin {row['margin']:.3g})"
    yield f"{verdict_text(row)}{margin}"


def _html(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(str(each))}</td>" for each in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"
