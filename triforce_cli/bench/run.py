"""The runs of a benchmark: one engine, one prefill, then the methods in turn, round after round."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from offload.config import GenerationConfig, Sampling, Speculation
from offload.engine import Engine
from offload.errors import PromptError
from offload.events import Prefilled, Tokens
from offload.levels import has_draft_model
from offload.loader import OpenModel, open_model
from offload.metrics import Meter
from offload.offloading import TierSettings
from offload.parallel import ALONE, Group
from offload.units import counted

from ..distributed.rank import check_alike
from ..exit_codes import DONE, INTERRUPTED
from ..options.settings import Settings
from ..output.fetching import FetchBar
from ..output.progress import ProgressDisplay, RunFacts
from ..output.renderers import json_line
from ..output.status_line import StatusLine
from ..output.terminal import Terminal
from ..run.dry_run import tell_dry_run
from ..run.following import on_device, tiers_for
from ..run.machine import processor
from .methods import BASE, speculations
from .plot import plot as draw
from .report import Comparison, Measured, Sample


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be compared. No `methods` are all that can run; `context` is how much of the text to take."""

    text: str
    settings: Settings
    methods: tuple[str, ...] | None
    context: int | None
    repeats: int
    home: Path | None
    group: Group | None = None  # the ranks that share the model; None: this process has all of it


@dataclass(frozen=True, slots=True)
class _Job:
    """A plan that has been checked against its model: everything but the weights."""

    plan: Plan
    opened: OpenModel
    ids: list[int]
    sampling: Sampling
    speculations: dict[str, Speculation]
    tiers: TierSettings | None

    @property
    def config(self) -> GenerationConfig:
        return self.plan.settings.generation


def run_benchmark(
    plan: Plan, terminal: Terminal, json: bool, plot: Path | None, quiet: bool, dry_run: bool = False
) -> int:
    """Measure, and write what was measured; returns the exit code. Raises TriforceError, BrokenPipeError."""
    job = _check(plan, terminal, quiet, dry_run)
    if dry_run:
        return tell_dry_run(job.opened, plan.settings, len(job.ids) + job.config.max_new_tokens, terminal, json)
    status = StatusLine(terminal)  # drawn once a run: a spinner would take time from what is measured

    def tell(what: str) -> None:
        status.clear()
        if not quiet:
            status.refresh(lambda: Text(what))

    with closing(ProgressDisplay(terminal, shown=not quiet)) as display:
        display.loading(f"loading {plan.settings.engine.model}")
        engine = job.opened.load(tiers=job.tiers).without_end()
        measured = [Measured(name, _memory(job, settings)) for name, settings in job.speculations.items()]
        interrupted, prefill_s = False, None
        try:
            prefill_s = _prefill(job, engine, display)
            _measure(job, engine, measured, prefill_s, tell)
            _judge(job, engine, measured, tell)
        except KeyboardInterrupt:
            interrupted = True
            display.hide()
        finally:
            status.clear()
    if interrupted:
        terminal.after_ctrl_c()
    comparison = Comparison(_facts(job, engine, prefill_s), job.sampling.greedy, measured)
    if json or measured[0].samples:
        _tell(comparison, terminal, json, interrupted)
    if plot is not None and measured[0].samples:
        draw(plot, {row["method"]: row["tokens_per_s"] or 0.0 for row in comparison.rows()}, comparison.title())
    return INTERRUPTED if interrupted else DONE


def _tell(comparison: Comparison, terminal: Terminal, json: bool, interrupted: bool) -> None:
    if json:
        terminal.write(json_line(**comparison.as_json(interrupted)))
    else:
        terminal.write(comparison.as_table(drawn=terminal.stdout_is_terminal))


def _check(plan: Plan, terminal: Terminal, quiet: bool, dry_run: bool) -> _Job:
    """Everything that can go wrong before the weights are loaded goes wrong here."""
    settings = plan.settings
    methods = speculations(plan.methods, settings.speculation)
    # Opened for the method that needs most: a draft model is found and loaded if any of them uses one.
    widest = next((method for method in methods.values() if has_draft_model(method)), methods[BASE])
    with FetchBar(terminal, shown=not quiet) as progress:
        opened = open_model(settings.engine, plan.home, progress, widest, plan.group or ALONE)
    check_alike(opened, settings, {"methods": list(methods), "repeats": plan.repeats, "context": plan.context})
    ids = _first_tokens(opened.tokenizer.encode(plan.text, special_tokens=True), plan.context)
    opened.new_tokens(len(ids), settings.generation.max_new_tokens, exact=True)
    sampling = settings.sampling(opened.sampling)
    tokens = len(ids) + settings.generation.max_new_tokens
    found = [
        tiers_for(replace(opened, speculation=method), replace(settings, speculation=method), tokens, terminal)
        for method in (() if dry_run else methods.values())
    ]
    spread = [tiers for tiers in found if tiers is not None]
    # All methods on one placement: that of the one which leaves least room for layers on the device.
    tiers = min(spread, key=on_device, default=None)
    return _Job(plan, opened, ids, sampling, methods, tiers)


def _first_tokens(ids: list[int], wanted: int | None) -> list[int]:
    if wanted is not None and wanted > len(ids):
        raise PromptError(
            f"the prompt has {counted(len(ids), 'token')}, fewer than --context {wanted:,}",
            f"give a longer text, or use --context {len(ids)}",
        )
    return ids[:wanted]


def _memory(job: _Job, method: Speculation) -> int:
    """Bytes that a method keeps beside the model's weights: KV caches, and a draft model where it uses one."""
    draft = job.opened.draft if has_draft_model(method) else None
    need = replace(job.opened, speculation=method, draft=draft).estimate(len(job.ids) + job.config.max_new_tokens)
    return need.kv + need.retrieval + need.draft


def _prefill(job: _Job, engine: Engine, display: ProgressDisplay) -> float:
    """Read the prompt into the caches that all runs share; seconds."""
    settings = job.plan.settings
    context = job.opened.checkpoint.shape.context
    display.start(RunFacts(settings.engine.model, BASE, context, len(job.ids), job.config.seed or 0))
    meter = Meter(len(job.ids))
    with closing(engine.generate(job.ids, job.sampling, job.config, job.speculations[BASE])) as events:
        for event in events:
            meter.observe(event)
            display.event(event)
            if isinstance(event, Prefilled) and event.done == event.total:
                break
    display.hide()
    return meter.prefill_s


def _measure(
    job: _Job, engine: Engine, measured: list[Measured], prefill_s: float, tell: Callable[[str], None]
) -> None:
    """Every method once a round: what disturbs the machine for a while disturbs all of them."""
    runs = [one for _ in range(job.plan.repeats) for one in measured]
    for number, one in enumerate(runs, 1):
        tell(f"bench · {one.method} · run {number} of {len(runs)}")
        one.samples.append(_run(job, engine, job.speculations[one.method], prefill_s))


def _judge(job: _Job, engine: Engine, measured: list[Measured], tell: Callable[[str], None]) -> None:
    """Look into greedy outputs that differ from plain decoding's; methods often share one."""
    if not job.sampling.greedy:
        return
    known: dict[tuple[int, ...], bool] = {}
    for one in measured:
        for ids in sorted({sample.ids for sample in one.samples} - {measured[0].samples[0].ids}):
            if ids not in known:
                tell(f"bench · {one.method} · comparing with plain decoding")
                known[ids] = engine.replay(job.ids, ids, job.sampling).lossless
            one.lossless = known[ids] and one.lossless is not False


def _run(job: _Job, engine: Engine, method: Speculation, prefill_s: float) -> Sample:
    """One generation. The prompt is in the caches but for its last token, whose time is in `prefill_s` already."""
    meter = Meter(len(job.ids))
    ids: list[int] = []
    with closing(engine.generate(job.ids, job.sampling, job.config, method)) as events:
        for event in events:
            meter.observe(event)
            if isinstance(event, Tokens):
                ids += event.ids
    summary = meter.summary("length", method=method.method)
    to_first = summary.ttft_s - summary.prefill_s
    return Sample(replace(summary, ttft_s=prefill_s + to_first), meter.gaps, tuple(ids))


def _facts(job: _Job, engine: Engine, prefill_s: float | None) -> dict[str, Any]:
    settings = job.plan.settings
    resolved = settings.described(job.sampling) | {"device": job.opened.device.type}
    del resolved["method"], resolved["stop"]  # of single requests
    return {
        "triforce": version("triforce"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "name": processor(job.opened.device),
            "threads": torch.get_num_threads(),
            "engine": engine.describe(),
            "torch": torch.__version__,
        },
        "model": settings.engine.model,
        "prompt_tokens": len(job.ids),
        "new_tokens": job.config.max_new_tokens,
        "repeats": job.plan.repeats,
        "prefill_s": prefill_s,
        "prefill_tokens_per_s": len(job.ids) / prefill_s if prefill_s else None,
        "settings": resolved,
    }
