"""Draws a quality report: perplexity by position, needles by depth, and divergence against memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..plot import new_figure, write_figure
from .report import QualityReport
from .table import title


def plot(path: Path, report: QualityReport) -> None:
    """Write the charts; the file is replaced as a whole."""
    rows = report.rows()
    figure = new_figure((13.0, 4.5))
    figure.suptitle(title(report), fontsize=9, wrap=True)
    by_position, needles, memory = figure.subplots(1, 3)
    _by_position(by_position, rows)
    _needles(needles, rows)
    _memory(memory, rows)
    for axes in (by_position, needles, memory):
        axes.spines[["top", "right"]].set_visible(False)
    by_position.legend(fontsize=8)
    write_figure(figure, path)


def _by_position(axes: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        parts = row["perplexity_by_position"]
        axes.plot([each["to"] for each in parts], [each["perplexity"] for each in parts], marker=".", label=row["mode"])
    axes.set_xlabel("scored tokens")
    axes.set_ylabel("perplexity")


def _needles(axes: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        found = sorted(row["needles"], key=lambda needle: needle["depth"])
        axes.plot([each["depth"] for each in found], [each["log_prob"] for each in found], marker="o")
    axes.set_xlabel("depth of the needle")
    axes.set_ylabel("log-probability of a token of it")
    axes.set_xlim(0, 1)


def _memory(axes: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        x, y = (row["kv_bytes"] + row["weights_bytes"]) / 2**20, 1000 * row["token_s"]
        axes.scatter([x], [row["kl"]])
        axes.annotate(
            f"{row['mode']}, {y:.0f} ms", (x, row["kl"]), fontsize=8, xytext=(4, 4), textcoords="offset points"
        )
    axes.set_xlabel("weights and KV, MiB")
    axes.set_ylabel("KL divergence from exact, nats")
