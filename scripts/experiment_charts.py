"""The charts of docs/experiments.md, drawn from what `triforce experiment NAME --quick --json` wrote.

The files are docs/benchmarks/*-experiment-NAME-*.json; scripts/quick_experiments.sh makes them. The chart of
`beyond_context` is of a run of `triforce bench --quality --json`, without the log-probability of every token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, floor, log10
from typing import Any

from charts import newest

from offload.units import counted
from triforce_cli.output.svg import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Picture, Plot, Scale, spread

Row = Mapping[str, Any]
Lines = dict[str, list[tuple[str, float]]]  # by their label: (name of the place on the x axis, value)
WIDTH, HEIGHT = 760, 350
LEFT, RIGHT, TOP, BOTTOM = 74, 520, 92, 290
COLOURS = (
    ("retrieval", ORANGE),
    ("triforce", BLUE),
    ("lookup", PURPLE),
    ("h2o", RED),
    ("window attention", RED),
    ("streaming", GREEN),
    ("StreamingLLM", GREEN),
    ("recomputed", PURPLE),
    ("ideal", GREY),
    ("exact", GREY),
    ("dense", GREY),
    ("on 5 %", BLUE),
    ("with under 1 %", ORANGE),
    ("attention received", BLUE),
)
MASKED = {
    "exact": "none",
    "heavy": "5 %, the heavy hitters",
    "heavy-but-sink": "5 %, heavy hitters but the sink",
    "random": "5 %, others at random",
}


@dataclass(frozen=True)
class Chart:
    """One chart: `lines` returns its lines from the rows of the measurement.

    `is_log` is for values over several powers of ten; `step` is the distance of other ticks. `part` tells the charts of
    one experiment apart.
    """

    experiment: str
    title: str
    x: str
    y: str
    lines: Callable[[Sequence[Row]], Lines]
    step: float = 0.1
    is_log: bool = False
    is_share: bool = False
    part: str = ""

    @property
    def picture(self) -> str:
        """Return the picture's name."""
        return f"experiment-{self.experiment}{self.part and '-'}{self.part}"


def _accepted(rows: Sequence[Row], along: str) -> Lines:
    """Return the acceptance by the full cache along a setting, a line for each method, with its drafter."""
    found: Lines = {}
    for row in rows:
        pair = next((pair for pair in row["acceptance"] if pair.endswith("-> full")), None)
        if pair is not None:
            label = row["method"].removesuffix(":none")
            label += f", draft: {row['draft']}" if label == "triforce" else ""
            found.setdefault(label, []).append((f"{row[along]:g}", row["acceptance"][pair]))
    return found


def _measured(rows: Sequence[Row], along: str, measure: str) -> Lines:
    """Return a measure along a setting, a line for each method but the exact one."""
    found: Lines = {}
    for row in rows:
        if row[along] is not None:
            found.setdefault(row["method"], []).append((f"{row[along]:,}", row[measure]))
    return found


def _by_layer(rows: Sequence[Row]) -> Lines:
    """Return the recovered attention of each layer, with the largest budget."""
    budget = max(row["budget"] for row in rows)
    return {
        row["method"]: [(layer, value) for layer, value in row["recovered_by_layer"].items()]
        for row in rows
        if row["budget"] == budget
    }


def _concentration(rows: Sequence[Row]) -> Lines:
    """Return by layer the attention on few tokens, and how many tokens have next to none."""
    names = {"on 5 % of the tokens": "kept_by_layer", "with under 1 % of the largest": "sparsity_by_layer"}
    return {label: list(rows[0][name].items()) for label, name in names.items()}


def _by_rank(rows: Sequence[Row]) -> Lines:
    """Return what the tokens of each rank have received."""
    return {"attention received": list(rows[0]["received_by_rank"].items())}


def _by_position(rows: Sequence[Row]) -> Lines:
    """Return the perplexity by position of each way to read a text, with the smaller cache; one token of sink."""
    budget = min(row["budget"] for row in rows if row["budget"] is not None)
    names = {"exact": "exact (dense)", "recompute": "recomputed window"}
    sinks = {0: "window attention", 1: "StreamingLLM, sink 1", 4: "StreamingLLM, sink 4"}
    found: Lines = {}
    for row in rows:
        if row["budget"] in (None, budget) and row["sink"] in (None, *sinks):
            label = sinks[row["sink"]] if row["sink"] is not None else names[row["method"]]
            found[label] = [(each.partition("-")[2], value) for each, value in row["perplexity_by_position"].items()]
    return found


def _by_depth(rows: Sequence[Row]) -> Lines:
    """Return the log-probability of a needle's tokens by its depth, in the longest text."""
    context = max(row["context"] for row in rows)
    return {
        row["method"]: list(row["needle_by_depth"].items())
        for row in rows
        if row["context"] == context and row["needle_by_depth"]
    }


CHARTS = (
    Chart(
        "temperature",
        "Acceptance by the full cache against temperature",
        "temperature",
        "accepted",
        partial(_accepted, along="temperature"),
        is_share=True,
    ),
    Chart(
        "budget",
        "Acceptance by the full cache against the budget",
        "budget, tokens",
        "accepted",
        partial(_accepted, along="budget"),
        is_share=True,
    ),
    Chart(
        "locality",
        "Acceptance against the tokens after which a selection is made anew",
        "--rebuild-every",
        "accepted",
        partial(_accepted, along="rebuild_every"),
        is_share=True,
    ),
    Chart(
        "attention",
        "Attention that selections recover, by layer",
        "layer",
        "share of the attention",
        _by_layer,
        is_share=True,
    ),
    Chart(
        "streaming-llm",
        "Perplexity by position among the scored tokens",
        "scored tokens, to",
        "perplexity",
        _by_position,
        is_log=True,
    ),
    Chart(
        "h2o",
        "Divergence from exact decoding against the budget",
        "budget, tokens",
        "KL, nats",
        partial(_measured, along="budget", measure="kl"),
    ),
    Chart(
        "needles",
        "Log-probability of a needle's tokens by its depth",
        "depth of the needle",
        "nats",
        _by_depth,
        step=2.0,
    ),
    Chart(
        "heavy-hitters",
        "How concentrated attention is, by layer",
        "layer",
        "share of a query's attention, and of the tokens",
        _concentration,
        is_share=True,
        part="layers",
    ),
    Chart(
        "heavy-hitters",
        "Attention that a token receives in all, by its rank",
        "rank of the token, among those of its KV head",
        "queries' worth of attention",
        _by_rank,
        is_log=True,
        part="ranks",
    ),
)


def draw(chart: Chart) -> Picture:
    """Draw a chart from the newest run of its experiment."""
    found = newest(f"*-experiment-{chart.experiment}-*.json")
    draft = found["measured"]["settings"]["draft"]
    return _drawn(chart, chart.lines([row | {"draft": draft} for row in found["measured"]["points"]]), _about(found))


def masked() -> Picture:
    """Draw the perplexity of a text of which some tokens are masked."""
    found = newest("*-experiment-heavy-hitters-*.json")
    picture = _titled("Perplexity of the tokens that follow, by what is masked", _about(found), 190)
    rows = {row["method"]: row["masked_perplexity"] for row in found["measured"]["points"]}
    for number, (name, label) in enumerate(MASKED.items()):
        y, width = 76 + 26 * number, 400 * rows[name] / max(rows.values())
        picture.text(244, y + 13, label, 12, "", "end")
        picture.box(254, y, width, 17, RED if name == "heavy" else GREY, 0.6)
        picture.text(262 + width, y + 13, f"{rows[name]:.1f}", 12)
    return picture


def sink_map() -> Picture:
    """Draw the mean attention within 16 tokens in some layers: a row is a query, a column a key."""
    found = newest("*-experiment-heavy-hitters-*.json")
    picture = _titled("Mean attention within 16 tokens, by layer; across: keys", _about(found), 210)
    cells: dict[str, list[tuple[int, int, float]]] = {}
    for name, weight in found["measured"]["points"][0]["map"].items():
        layer, query, key = name.split()
        cells.setdefault(layer, []).append((int(query), int(key), weight))
    for number, (layer, each) in enumerate(cells.items()):
        left, top, size = 24 + 103 * number, 92, 5.8
        picture.text(left, top - 8, f"layer {layer}", 12, "muted")
        picture.box(left, top, 16 * size, 16 * size, GREY, 0)
        for level in range(1, 11):  # weights, in tenths: one path each
            some = [(query, key) for query, key, weight in each if ceil(10 * min(weight, 1)) == level]
            path = "".join(f"M{left + key * size:.1f} {top + query * size:.1f}h5.8v5.8h-5.8z" for query, key in some)
            picture.parts.append(f'<path d="{path}" fill="{RED}" fill-opacity="{(level - 0.5) / 10:.2f}"/>')
    return picture


def _titled(title: str, about: str, height: int) -> Picture:
    picture = Picture(title, WIDTH, height)
    picture.text(24, 32, title, 15, "bold")
    picture.text(24, 50, about, 11, "muted")
    return picture


def beyond_context() -> Picture:
    """Draw the perplexity of dense attention and of StreamingLLM beyond the context that a model was trained for."""
    found = newest("*-beyond-context-*.json")
    title = "Perplexity beyond the context of the model, 8,192 tokens"
    chart = Chart("", title, "tokens of the text, to", "perplexity", _from_text_start, is_log=True)
    about = f"{found['model']}, {found['text_tokens']:,} tokens of a novel, {found['date'][:10]}"
    first = found["text_tokens"] - found["scored_tokens"]
    rows = [row | {"first": first} for row in found["modes"]]
    return _drawn(chart, chart.lines(rows), f"triforce bench --quality --modes streaming-llm,dense: {about}")


def _from_text_start(rows: Sequence[Row]) -> Lines:
    """Return the perplexity of each mode by the tokens of the text up to the end of each part."""
    names = {"dense": "dense attention", "streaming-llm": "StreamingLLM"}
    return {
        names[row["mode"]]: [
            (f"{row['first'] + part['to']:,}", part["perplexity"]) for part in row["perplexity_by_position"]
        ]
        for row in rows
    }


def _drawn(chart: Chart, lines: Lines, about: str) -> Picture:
    picture = _titled(chart.title, about, HEIGHT)
    places = list(dict.fromkeys(place for points in lines.values() for place, _ in points))
    ticks = _ticks(chart, [value for points in lines.values() for _, value in points])
    scale = Scale(_height(chart, ticks[0]), _height(chart, ticks[-1]), BOTTOM, TOP)
    plot = Plot(picture, Scale(0, max(len(places) - 1, 1), LEFT, RIGHT), scale)
    every = ceil(len(places) / 10)
    shown = [(number, place) for number, place in enumerate(places) if number % every == 0]
    labels = [(_height(chart, tick), f"{tick:.0%}" if chart.is_share else f"{tick:g}") for tick in ticks]
    plot.axes(shown, labels, chart.x, chart.y)
    curves = {
        label: [(places.index(place), _height(chart, value)) for place, value in points]
        for label, points in lines.items()
    }
    heights = spread([plot.y(points[-1][1]) for points in curves.values()], 18)
    for (label, points), height in zip(curves.items(), heights, strict=True):
        colour = next(colour for name, colour in COLOURS if label.startswith(name))
        plot.line(points, colour, dashed=label.endswith(("middle=h2o", "sink 1")) or colour == GREY)
        picture.box(RIGHT + 16, height - 4, 8, 8, colour, 1)
        picture.text(RIGHT + 30, height + 4, label, 12)
    return picture


def _about(found: Mapping[str, Any]) -> str:
    """Return what was run, in a line."""
    prompts = found["measured"]["prompts"]
    longest = max(each["tokens"] for each in prompts)
    texts = f"{counted(len(prompts), 'text')} of up to {longest:,} tokens"
    return f"triforce experiment {found['name']} --quick: {found['measured']['model']}, {texts}, {found['date'][:10]}"


def _height(chart: Chart, value: float) -> float:
    return log10(value) if chart.is_log else value


def _ticks(chart: Chart, values: Sequence[float]) -> list[float]:
    """Return ticks around all values: 1, 2, 5 and 10 times powers of ten, or multiples of the chart's step."""
    if chart.is_log:
        powers = range(floor(log10(min(values))), ceil(log10(max(values))) + 1)
        every = [part * 10.0**power for power in powers for part in (1, 2, 5)]
        low, high = max(each for each in every if each <= min(values)), min(x for x in every if x >= max(values))
        return [each for each in every if low <= each <= high]
    low, high = floor(round(min(values) / chart.step, 6)), ceil(round(max(values) / chart.step, 6))
    return [number * chart.step for number in range(min(low, high - 1), high + 1)]


PICTURES = {chart.picture: partial(draw, chart) for chart in CHARTS}
PICTURES |= {"experiment-heavy-hitters-masked": masked, "experiment-heavy-hitters-map": sink_map}
PICTURES["beyond-context"] = beyond_context
