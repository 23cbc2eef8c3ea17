"""The runs of `bench --batch`: several sequences together, beside the same ones one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

from offload.batching.batch import Failed
from offload.batching.request import BatchRequest
from offload.engine import Engine
from offload.errors import SettingsError
from offload.events import Tokens
from offload.metrics import Meter, Summary
from offload.settings.config import Speculation
from offload.settings.generation import FASTEST

from ..exit_codes import DONE, INTERRUPTED
from ..output.progress import ProgressDisplay
from ..output.stdout_formats import json_line
from ..output.terminal import Terminal
from ..run.parallel import check_sequences
from .batch_report import BatchComparison, BatchRuns, BatchSample, report_text
from .benchmark import Benchmark, BenchRequest, open_benchmark
from .methods import BASE, IN_BATCHES
from .noise import OtherLoad
from .run import BenchOutput, describe_run, prepare_copies, warn_of_quantized_weights
from .run_status import run_status
from .windows import windows


def run_batches(
    bench: BenchRequest, sizes: Sequence[int], terminal: Terminal, output: BenchOutput, display: ProgressDisplay
) -> int:
    """Run every method with batches of every size; write the throughputs; return the exit code. Closes the display.

    Raises TriforceError, BrokenPipeError.
    """
    bench = replace(bench, methods=bench.methods or IN_BATCHES)
    benchmark = open_benchmark(bench, terminal, output.quiet)
    prompts = _open_prompts(benchmark, bench, max(sizes))
    with closing(display):
        display.loading(f"loading {benchmark.settings.engine.model}")
        engine = benchmark.model.load().without_end()
        agreement = warn_of_quantized_weights(benchmark, engine, display, terminal)
        sizes = sorted({1, *sizes})
        names = [name for name in benchmark.speculations if name != BASE or BASE in bench.methods]
        runs = [BatchRuns(name, size) for name in names for size in sizes]
        interrupted, load = False, OtherLoad()
        try:
            with run_status(terminal, output.quiet) as show:
                prepare_copies(benchmark, engine, display)
                display.hide()
                _measure(benchmark, engine, prompts, runs, show)
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        terminal.after_ctrl_c()
    facts = describe_run(benchmark, engine, None, agreement)
    comparison = BatchComparison(facts, benchmark.sampling.kind != FASTEST, runs, load.cores())
    if output.json:
        terminal.write(json_line(**comparison.as_json(interrupted)))
    elif runs[0].samples:
        terminal.print(report_text(comparison, terminal.table_width))
    return INTERRUPTED if interrupted else DONE


def _open_prompts(benchmark: Benchmark, bench: BenchRequest, count: int) -> list[list[int]]:
    """Return the prompts of the largest batch. Raises SettingsError, or OutOfMemory where they do not fit together."""
    if benchmark.tiers is not None or benchmark.model.group.size > 1:
        raise SettingsError("--batch needs all keys and values in this process's memory", "leave --batch out")
    for method in benchmark.speculations.values():
        model = replace(benchmark.model, speculation=method)
        check_sequences(model, benchmark.settings, benchmark.length, count, "--batch")
    encode = benchmark.model.tokenizer.encode
    whole, plain = encode(bench.text, special_tokens=True), encode(bench.text, special_tokens=False)
    return windows(whole[: len(whole) - len(plain)], plain, len(benchmark.ids), count)


def _measure(
    benchmark: Benchmark,
    engine: Engine,
    prompts: list[list[int]],
    runs: Sequence[BatchRuns],
    show: Callable[[str], None],
) -> None:
    """Run every batch once a round: a passing disturbance of the machine then affects all of them."""
    order = [each for _ in range(benchmark.repeats) for each in runs]
    for number, each in enumerate(order, 1):
        show(f"bench · {each.method} · batch {each.size} · run {number} of {len(order)}")
        method = benchmark.speculations[each.method]
        run = _one_after_the_other if each.size == 1 else _together
        chosen = prompts if each.size == 1 else prompts[: each.size]
        each.samples.append(run(benchmark, engine, chosen, method))


def _one_after_the_other(
    benchmark: Benchmark, engine: Engine, prompts: list[list[int]], method: Speculation
) -> BatchSample:
    """Generate for each prompt alone: what batches are compared with."""
    meters, started = [], time.perf_counter()
    for ids in prompts:
        engine.forget()  # the beginning of an earlier prompt is read again
        meters.append(meter := Meter(len(ids)))
        with closing(engine.generate(ids, benchmark.sampling, benchmark.config, method)) as events:
            for _ in meter.watch(events):
                pass
    total_s = time.perf_counter() - started
    engine.release()
    tokens, seconds = sum(len(meter.gaps) for meter in meters), sum(sum(meter.gaps) for meter in meters)
    return BatchSample(tokens, seconds, total_s, [tuple(meter.ids) for meter in meters])


def _together(benchmark: Benchmark, engine: Engine, prompts: list[list[int]], method: Speculation) -> BatchSample:
    return run_together(benchmark, engine, prompts, method)[1]


def run_together(
    benchmark: Benchmark, engine: Engine, prompts: Sequence[list[int]], method: Speculation
) -> tuple[list[Summary], BatchSample]:
    """Generate for all prompts in a batch; return the summary of each sequence, and what all decoded together."""
    meters = [Meter(len(ids)) for ids in prompts]
    found: list[list[tuple[float, int]]] = [[] for _ in prompts]  # when how many tokens came
    outputs: list[list[int]] = [[] for _ in prompts]
    started = time.perf_counter()
    requests = [BatchRequest(key, ids, benchmark.sampling, benchmark.config, method) for key, ids in enumerate(prompts)]
    with closing(engine.generate_batch(requests, len(prompts))) as events:
        for key, event in events:
            if isinstance(event, Failed):
                raise event.error
            meters[key].observe(event)
            if isinstance(event, Tokens) and event.ids:
                found[key].append((time.perf_counter(), len(event.ids)))
                outputs[key] += event.ids
    total_s = time.perf_counter() - started
    first, last = max(times[0][0] for times in found), min(times[-1][0] for times in found)
    tokens = sum(count for times in found for at, count in times if first < at <= last)
    sample = BatchSample(tokens, max(last - first, 0.0), total_s, list(map(tuple, outputs)))
    return [meter.summary("length", method=method.method) for meter in meters], sample
