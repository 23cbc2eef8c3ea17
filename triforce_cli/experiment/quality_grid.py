"""Measures how much lossy modes change the answer: `bench --quality` over lists of settings and several texts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.settings.methods import APPROXIMATIONS

from ..bench.axes import CONTEXT
from ..bench.compared import EXACT, RECOMPUTE
from ..bench.quality import ModeQuality, QualityFound, measure_modes
from ..bench.quality_modes import QualityRequest, open_quality_run
from ..bench.report import Measure, Report
from ..output.format import percent
from ..output.progress import ProgressDisplay
from .grid import KINDS, QUALITY
from .overrides import ExperimentRequest
from .points import Inputs, Key, excerpts, points_of, report_of

SHOWN = (
    Measure("perplexity", "perplexity", "{:.3f}".format),
    Measure("kl", "KL divergence from exact, nats", "{:.4f}".format),
    Measure("top1_agreement", "same likeliest token", percent),
    Measure("needles_found", "needles found", "{:.1f}".format),
    Measure("needle_log_prob", "log-probability of a needle's token", "{:.2f}".format),
)
PROFILES = (
    Measure("perplexity_by_position", "perplexity by position among the scored tokens", "{:.2f}".format),
    Measure("needle_by_depth", "log-probability of a needle's token by its depth", "{:.2f}".format),
)
_READ = {  # settings that a mode reads, of those that vary
    **{name: approximation.reads for name, approximation in APPROXIMATIONS.items()},
    RECOMPUTE: ("budget",),
}


@dataclass(slots=True)
class _Found:
    """What was measured so far: the rows of each mode and point, and the exact mode's scores of a text."""

    rows: dict[Key, list[dict[str, Any]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)


def measure_quality(inputs: Inputs) -> tuple[Report, bool]:
    """Measure each mode at each point, on each text; return the rows, and whether Ctrl-C ended it.

    Raises TriforceError.
    """
    asked, own, _, terminal, display = inputs
    grid, found, interrupted = asked.grid, _Found(), False
    display.close()
    for name, text in excerpts(inputs):
        exact: dict[Any, ModeQuality] = {}  # by the context and what else every mode reads
        done: set[Key] = set()
        for values in points_of(grid):
            pending = [key for key in _keys(grid.methods, values, asked) if key not in done]
            if interrupted or not pending:
                continue
            modes = tuple(dict.fromkeys((EXACT, *(mode for mode, _ in pending))))
            more = {each: value for each, value in values.items() if each != CONTEXT and each in asked.grid.varied}
            request = asked.request({**own, "method": "ar"}, more)
            sizes = values.get(CONTEXT), grid.last, grid.needles
            run = open_quality_run(QualityRequest(request, text, modes, *sizes), terminal, asked.quiet)
            known = (values.get(CONTEXT), values.get("max_new_tokens"))
            shown = ProgressDisplay(terminal, not asked.quiet)  # every run closes its own
            measured = measure_modes(run, terminal, shown, exact.get(known))
            interrupted = measured.interrupted
            if measured.modes and measured.modes[0].mode == EXACT:
                exact[known] = measured.modes[0]
            done |= set(pending)
            _keep(found, name, measured, pending)
    facts = {**found.facts, "quantize": None, "agreement": None}
    return report_of(grid, facts, found.prompts, found.rows, SHOWN, PROFILES), interrupted


def _keys(methods: Sequence[str], values: Mapping[str, Any], asked: ExperimentRequest) -> Iterator[Key]:
    varied = [name for name in values if name in asked.grid.varied]
    for mode in KINDS[QUALITY].parse(methods):
        read = {name for part in mode.split("+") for name in _READ.get(part, ())} | {CONTEXT, "max_new_tokens"}
        yield mode, tuple((name, values[name] if name in read else None) for name in varied)


def _keep(found: _Found, name: str, measured: QualityFound, pending: Sequence[Key]) -> None:
    report = measured.report()
    found.facts = found.facts or dict(report.facts)
    found.prompts[name] = max(found.prompts.get(name, 0), report.facts["text_tokens"])
    rows = {row["mode"]: row for row in report.rows}
    for key in pending:
        if key[0] in rows:
            more = {"prompt_tokens": report.facts["text_tokens"], **_profiles(rows[key[0]])}
            found.rows.setdefault(key, []).append(rows[key[0]] | more)


def _profiles(row: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    parts = {f"{each['from']}-{each['to']}": each["perplexity"] for each in row["perplexity_by_position"]}
    needles = sorted(row["needles"], key=lambda needle: needle["depth"])
    return {
        "perplexity_by_position": parts,
        "needle_by_depth": {f"{each['depth']:.2f}": each["log_prob"] for each in needles},
    }
