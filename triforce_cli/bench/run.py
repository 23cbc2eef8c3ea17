"""The runs of a benchmark: one engine, one prefill, then the methods in turn, round after round."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload.engine import Engine
from offload.events import Prefilled
from offload.metrics import Meter
from offload.settings.config import Speculation
from offload.settings.generation import FASTEST
from offload.settings.method_sizes import has_draft_model, tree_nodes, uses_copy

from ..exit_codes import DONE, INTERRUPTED
from ..output.plan import print_plan
from ..output.progress import ProgressDisplay, RunFacts
from ..output.statistics import quantized_warning
from ..output.stdout_formats import json_line
from ..output.terminal import Terminal
from ..run.plan import plan_run
from .benchmark import Benchmark, BenchRequest, open_benchmark
from .methods import BASE
from .noise import OtherLoad
from .plot import plot as draw
from .provenance import provenance
from .report import Comparison, MethodRuns, Sample
from .run_status import run_status
from .table import report_text, title


@dataclass(frozen=True, slots=True)
class BenchOutput:
    """The form of the output: JSON or a table, without progress, and the file for a bar chart."""

    json: bool
    quiet: bool
    plot: Path | None


def run_benchmark(bench: BenchRequest, terminal: Terminal, output: BenchOutput, display: ProgressDisplay) -> int:
    """Run every method and write the comparison; return the exit code. Closes the display.

    Raises TriforceError, BrokenPipeError.
    """
    benchmark = open_benchmark(bench, terminal, output.quiet)
    if bench.request.dry_run:
        report = plan_run(benchmark.model, benchmark.settings, benchmark.length, terminal)
        report = replace(report, arguments=bench.request.arguments)
        display.close()  # the plan is the output
        return print_plan(report, bench.request.command, terminal, output.json)
    with closing(display):
        display.loading(f"loading {benchmark.settings.engine.model}")
        engine = benchmark.model.load(tiers=benchmark.tiers).without_end()
        agreement = warn_of_quantized_weights(benchmark, engine, display, terminal)
        runs = [MethodRuns(name, _memory(benchmark, method)) for name, method in benchmark.speculations.items()]
        interrupted, prefill_s = False, None
        load = OtherLoad() if benchmark.model.group.size == 1 else None  # other ranks are not other load
        try:
            with run_status(terminal, output.quiet) as show:
                prepare_copies(benchmark, engine, display)
                prefill_s = read_prompt(benchmark, engine, display)
                _measure(benchmark, engine, runs, prefill_s, show)
                _verify(benchmark, engine, runs, show)
        except KeyboardInterrupt:
            interrupted = True
            display.hide()
    if interrupted:
        terminal.after_ctrl_c()
    facts = describe_run(benchmark, engine, prefill_s, agreement)
    comparison = Comparison(facts, benchmark.sampling.kind != FASTEST, runs, None if load is None else load.cores())
    _write(comparison, terminal, output, interrupted)
    return INTERRUPTED if interrupted else DONE


def _write(comparison: Comparison, terminal: Terminal, output: BenchOutput, interrupted: bool) -> None:
    """Write the comparison, and the chart that was asked for; a table only if a method has run."""
    any_run = bool(comparison.methods[0].samples)
    if output.json:
        terminal.write(json_line(**comparison.as_json(interrupted)))
    elif any_run:
        terminal.print(report_text(comparison, terminal.table_width))
    if output.plot is not None and any_run:
        rates = {row["method"]: row["tokens_per_s"] or 0.0 for row in comparison.rows()}
        draw(output.plot, rates, title(comparison.facts))


def _memory(benchmark: Benchmark, method: Speculation) -> int:
    """Return the bytes of a method beside the model's weights: KV caches, and a draft model where it uses one."""
    draft = benchmark.model.draft if has_draft_model(method) else None
    need = replace(benchmark.model, speculation=method, draft=draft).estimate(benchmark.length)
    return need.kv + need.retrieval + need.draft + need.copy


def warn_of_quantized_weights(
    benchmark: Benchmark, engine: Engine, display: ProgressDisplay, terminal: Terminal
) -> float | None:
    """Warn of quantised weights; return how often they choose as the original ones, None if there are none."""
    level = benchmark.settings.engine.quantize
    if level is None:
        return None
    display.loading(f"comparing {level} with the original weights")
    agreement = benchmark.model.agreement(engine.model, benchmark.ids)
    display.hide()
    terminal.warn(quantized_warning(level, agreement))
    return agreement


def prepare_copies(benchmark: Benchmark, engine: Engine, display: ProgressDisplay) -> None:
    """Make the quantised copies that some methods draft with, before their times are measured."""
    for method in benchmark.speculations.values():
        if uses_copy(method):
            display.loading("rounding a copy of the weights, to draft with")
            engine.prepare(benchmark.ids, benchmark.config, method)


def read_prompt(benchmark: Benchmark, engine: Engine, display: ProgressDisplay) -> float:
    """Read the prompt into the caches that all runs share; return the seconds."""
    meter = Meter(len(benchmark.ids))
    context = benchmark.model.checkpoint.shape.context
    names, tokens = (benchmark.settings.engine.model, BASE), lambda: engine.model.pass_tokens
    display.start(RunFacts(*names, context, meter, pass_tokens=tokens))
    # The session gets room for the largest tree of all methods.
    widest = max(benchmark.speculations.values(), key=tree_nodes)
    method = replace(benchmark.speculations[BASE], tree=widest.tree)
    with closing(engine.generate(benchmark.ids, benchmark.sampling, benchmark.config, method)) as events:
        for event in meter.watch(events):
            display.event(event)
            if isinstance(event, Prefilled) and event.done == event.total:
                break
    display.hide()
    return meter.prefill_s


def _measure(
    benchmark: Benchmark, engine: Engine, runs: list[MethodRuns], prefill_s: float, show: Callable[[str], None]
) -> None:
    """Run every method once a round: a passing disturbance of the machine then affects all of them."""
    order = [each for _ in range(benchmark.repeats) for each in runs]
    for number, each in enumerate(order, 1):
        show(f"bench · {each.method} · run {number} of {len(order)}")
        each.samples.append(run_once(benchmark, engine, benchmark.speculations[each.method], prefill_s))


def _verify(benchmark: Benchmark, engine: Engine, runs: list[MethodRuns], show: Callable[[str], None]) -> None:
    """Compare outputs that differ from plain decoding's with it, where they should not; methods often share one."""
    if benchmark.sampling.kind == FASTEST:
        return
    seed = benchmark.config.seed or 0
    verified: dict[tuple[int, ...], bool] = {}
    for each in runs:
        for ids in sorted({sample.ids for sample in each.samples} - {runs[0].samples[0].ids}):
            if ids not in verified:
                show(f"bench · {each.method} · comparing with plain decoding")
                verified[ids] = engine.replay(benchmark.ids, ids, benchmark.sampling, seed=seed).lossless
            each.lossless = verified[ids] and each.lossless is not False


def run_once(benchmark: Benchmark, engine: Engine, method: Speculation, prefill_s: float) -> Sample:
    """Generate once. The prompt is in the caches but for its last token, whose time is in `prefill_s` already."""
    meter = Meter(len(benchmark.ids))
    with closing(engine.generate(benchmark.ids, benchmark.sampling, benchmark.config, method)) as events:
        for _ in meter.watch(events):
            pass
    summary = meter.summary("length", method=method.method)
    to_first = summary.ttft_s - summary.prefill_s
    return Sample(replace(summary, ttft_s=prefill_s + to_first), meter.gaps, tuple(meter.ids))


def describe_run(
    benchmark: Benchmark, engine: Engine, prefill_s: float | None, agreement: float | None
) -> dict[str, Any]:
    """Return the machine and the request, for the comparison."""
    settings = benchmark.settings
    level = settings.engine.quantize
    resolved = settings.described(benchmark.sampling) | {"device": benchmark.model.device.type}
    del resolved["method"], resolved["stop"]  # they differ between runs
    described = engine.describe() + (f", weights rounded to {level}" if level else "")
    return provenance(benchmark.model.device, described) | {
        "model": settings.engine.model,
        "quantize": level,
        "agreement": agreement,
        "prompt_tokens": len(benchmark.ids),
        "new_tokens": benchmark.config.max_new_tokens,
        "repeats": benchmark.repeats,
        "prefill_s": prefill_s,
        "prefill_tokens_per_s": len(benchmark.ids) / prefill_s if prefill_s else None,
        "settings": resolved,
    }
