"""The charts of the documentation, drawn from docs/benchmarks/*.json and from plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.architecture.known_models import KNOWN
from offload.hardware import profiles
from offload.hardware.rates import describe
from offload.planning.plan import Plan, make_plan
from offload.planning.request import PlanRequest
from offload.settings.config import Placement, Speculation
from triforce_cli.output.svg import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Picture, Plot, Scale, spread

BENCHMARKS = Path(__file__).parents[1] / "docs" / "benchmarks"
COLOURS = {
    "ar": GREY,
    "auto": RED,
    "lookup": PURPLE,
    "naive": RED,
    "retrieval": ORANGE,
    "streaming": GREEN,
    "triforce": BLUE,
}
LONG = 127 * 1024  # tokens of the paper's prompts with offloading


def newest(pattern: str) -> dict[str, Any]:
    """Return the newest result file that matches; names begin with the date."""
    return json.loads(max(BENCHMARKS.glob(pattern)).read_text("utf-8"))


def context() -> Picture:
    """Draw ms per token against the context: measured over a simulated link, and predicted for a GPU."""
    found = newest("*-context-streamed-*.json")
    measured: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(found["points"], key=lambda row: row["context"]):
        measured.setdefault(row["method"], []).append((row["context"], 1e3 / row["tokens_per_s"]))
    picture = Picture("Milliseconds per token against the context, for each method", 900, 430)
    picture.text(24, 32, "Measured", 15, "bold")
    picture.text(
        24,
        50,
        f"SmolLM2-135M, KV streamed at {found['settings']['link_gb_s']:g} GB/s (simulated); triforce drafts by lookup",
        11,
        "muted",
    )
    _curves(picture, 70, measured)
    picture.text(474, 32, "Predicted", 15, "bold")
    picture.text(474, 50, "Llama-2-7B-128K, RTX 4090, KV streamed; acceptance .92; draft Llama-68M", 11, "muted")
    _curves(picture, 520, predicted())
    return picture


def predicted() -> dict[str, list[tuple[float, float]]]:
    """Return for each method the predicted (context, ms per token) of Llama-2-7B-128K on an RTX 4090."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for method in ("ar", "retrieval", "triforce"):
        for tokens in (16384, 32768, 65536, 98304, 131072):
            plan = planned("Llama-2-7B-128K", "rtx-4090", method, tokens, budget=4096)
            curves.setdefault(method, []).append((tokens, 1000 * plan.chosen.tbt.seconds))
    return curves


def planned(
    model: str,
    gpu: str,
    method: str,
    tokens: int,
    layers: int | None = None,
    acceptance: float = 0.92,
    **speculation: Any,
) -> Plan:
    """Plan with an acceptance a token, and the paper's draft model for `triforce`."""
    draft = "JackFram/llama-68m" if method == "triforce" else "lookup"
    return make_plan(
        PlanRequest(
            model,
            KNOWN[model],
            tokens,
            describe(profiles.load(gpu)),
            Placement(offload="stream", resident_layers=layers),
            Speculation(method=method, draft=draft, gamma1=1, **speculation),
            draft=KNOWN["Llama-68M"],
            acceptance=acceptance,
            draft_acceptance=0.23,
        )
    )


def _curves(picture: Picture, left: float, curves: dict[str, list[tuple[float, float]]]) -> None:
    """Draw one curve for each method, with its name at the right end."""
    last = max(x for points in curves.values() for x, _ in points)
    top, step = _round_up(max(y for points in curves.values() for _, y in points))
    plot = Plot(picture, Scale(0, last, left, left + 270), Scale(0, top, 360, 90))
    ticks = [(last * i / 4, _tokens(last * i / 4)) for i in range(5)]
    plot.axes(
        ticks, [(step * i, f"{step * i:,.0f}") for i in range(round(top / step) + 1)], "context, tokens", "ms a token"
    )
    heights = spread([plot.y(points[-1][1]) for points in curves.values()], 16)
    for (method, points), height in zip(curves.items(), heights, strict=True):
        plot.line(points, COLOURS[method], method == "ar")
        name = "plain" if method == "ar" else method
        picture.box(left + 280, height - 4, 8, 8, COLOURS[method], 1)
        picture.text(left + 294, height + 4, f"{name} {points[-1][1]:,.0f}", 12)


def _round_up(value: float) -> tuple[float, float]:
    """Return a round top of an axis and the distance of its ticks."""
    step = next(s for s in (5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000) if value / s <= 6)
    return -(-value // step) * step, step


def _tokens(count: float) -> str:
    return f"{count / 1024:.0f}K" if count % 1024 == 0 and count else f"{count:,.0f}"


def acceptance() -> Picture:
    """Draw the measured acceptance rate against the budget of the small cache."""
    found = newest("*-acceptance-frankenstein-*.json")
    picture = Picture("Acceptance rate against the budget of the small cache", 680, 390)
    picture.text(24, 32, "How many drafted tokens the full cache accepts", 15, "bold")
    about = (
        f"SmolLM2-135M continues Frankenstein, {found['prompt_tokens']:,} tokens, greedy, {found['new_tokens']} tokens"
    )
    picture.text(24, 50, about, 11, "muted")
    plot = Plot(picture, Scale(0, 4096, 80, 470), Scale(0.85, 1, 330, 90))
    plot.axes(
        [(size, f"{size:,}") for size in (512, 1024, 2048, 4096)],
        [(0.85 + 0.05 * i, f"{85 + 5 * i} %") for i in range(4)],
        "budget, tokens",
        "accepted",
    )
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in found["results"]:
        name = f"retrieval, chunk {row['chunk']}" if row["method"] == "retrieval" else "streaming (sink + window)"
        colour = GREEN if row["method"] == "streaming" else (ORANGE if row["chunk"] == 8 else BLUE)
        curves.setdefault((name, colour), []).append((row["budget"], row["acceptance"]))
    heights = spread([plot.y(points[-1][1]) for points in curves.values()], 18)
    for ((name, colour), points), height in zip(curves.items(), heights, strict=True):
        plot.line(points, colour, dashed=name.endswith("16"))
        picture.text(484, height + 4, name, 12)
        picture.box(474, height - 3, 6, 6, colour, 1)
    return picture


# Model, profile, layers resident in the reference (None: as many as fit), budget, gamma2; ms a token without and with
# speculation in TriForce, arXiv 2404.11912. tests/planning/test_latency.py plans the same cases.
PUBLISHED = (
    ("Llama-2-7B, 2 × RTX 4090", "Llama-2-7B-128K", "2x-rtx-4090", (12, 9), 12288, 16, (840, 108)),
    ("Llama-2-13B, 2 × RTX 4090", "Llama-2-13B-128K", "2x-rtx-4090", (None, None), 12288, 16, (1794, 226)),
    ("Llama-2-7B, RTX 4090", "Llama-2-7B-128K", "rtx-4090", (0, 0), 8192, 12, (2434, 312)),
)


def published() -> Picture:
    """Draw predicted ms per token beside those that the TriForce paper published."""
    picture = Picture("Predicted against published milliseconds per token", 780, 450)
    picture.text(24, 32, "Predicted by triforce profile, and published in the TriForce paper", 15, "bold")
    settings = "the paper's settings, its draft Llama-68M, its acceptance with 4,096 tokens, .914"
    about = f"127K tokens, KV offloaded, ms a token; {settings}"
    picture.text(24, 50, about, 11, "muted")
    y = 74.0
    for label, model, gpu, layers, budget, gamma, times in PUBLISHED:
        picture.text(24, y + 14, label, 13, "bold")
        y += 6
        for method, resident, time in zip(("ar", "triforce"), layers, times, strict=True):
            plan = planned(model, gpu, method, LONG, resident, 0.9137, budget=budget, gamma2=gamma)
            y = _pair(picture, y, method, (time, 1000 * plan.chosen.tbt.seconds))
        y += 6
    return picture


def _pair(picture: Picture, y: float, method: str, times: Sequence[float]) -> float:
    """Draw the published and the predicted bar of one method; return where the next row begins."""
    picture.text(230, y + 31, "plain" if method == "ar" else method, 12, "", "end")
    for offset, (name, time) in enumerate(zip(("published", "predicted"), times, strict=True)):
        colour = GREY if name == "published" else COLOURS["triforce"]
        picture.box(240, y + 15 + offset * 19, 380 * time / 2800, 15, colour, 0.6)
        picture.text(248 + 380 * time / 2800, y + 27 + offset * 19, f"{time:,.0f} {name}", 11)
    return y + 52
