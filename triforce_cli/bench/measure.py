"""Measures the cells of a benchmark: each prompt is read once, then all its cells run in turn, round after round.

What is finished goes to the points file at once; a run that is found there is not run again.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from offload.engine import Engine
from offload.settings.generation import FASTEST
from offload.speculation.levels.lossless import Replay
from offload.units import counted

from ..distributed.rank import broadcast
from ..options.mode_checks import approximation_warnings
from ..output.format import rounded
from ..output.progress import ProgressDisplay
from ..output.terminal import Terminal
from ..run.processor import OtherLoad
from ..run.prompt_cache import open_prompt_cache
from .benchmark import Benchmark, BenchOutput, BenchRequest
from .cells import TYPE, Cell, PointsFile, Record, by_identity, identity
from .measurement import Measurement
from .opened import OpenBench, open_bench
from .peer import Peer
from .report import GRID, LADDER, versioned
from .rows import outputs_of
from .runs import (
    Run,
    read_prompt,
    run_in_turn,
    run_once,
    run_peer,
    run_status,
    run_together,
    warn_of_quantized_weights,
)


def run_bench(asked: BenchRequest, terminal: Terminal, output: BenchOutput, display: ProgressDisplay) -> int:
    """Run what is not finished, and write the report; return the exit code. Closes the display.

    Raises TriforceError, OSError.
    """
    request = asked.request
    if request.dry_run:
        widest = open_bench(asked, terminal, output.quiet).widest
        return output.plan(widest.model, widest.settings, widest.length, request, terminal, display)
    run = run_measurement(asked, terminal, output.quiet, display)
    return output.write(run.report(), terminal, run.interrupted, request.is_first)


def run_measurement(asked: BenchRequest, terminal: Terminal, quiet: bool, display: ProgressDisplay) -> Measurement:
    """Run what is not finished, and return all. Closes the display. Ctrl-C ends it, with what is done.

    Raises TriforceError, OSError.
    """
    bench = open_bench(asked, terminal, quiet)
    group = asked.request.group
    is_writer = group is None or group.rank == 0
    file = PointsFile(asked.points, terminal.warn) if asked.points is not None and is_writer else None
    try:
        # Of rank 0: what identifies a run, such as the path of the model, may differ between ranks.
        kept = broadcast(group, lambda: _found(bench, by_identity([] if file is None else file.kept)))
        finished = {cell: dict(runs) for cell, runs in zip(bench.cells, kept, strict=True) if runs}
        run = Measurement(bench, finished, file)
        if run.pending:
            _load_and_measure(run, terminal, quiet, display)
        display.close()
        return run
    finally:
        if file is not None:
            file.close()


def _found(bench: OpenBench, records: dict[str, Record]) -> list[list[tuple[int, Record]]]:
    """Return the finished runs of each cell among the records of a file, with the number of their repeat."""
    repeats = range(bench.asked.repeats) if records else ()
    rows = [[(repeat, records.get(identity(bench.facts(cell, repeat)))) for repeat in repeats] for cell in bench.cells]
    return [[(repeat, record) for repeat, record in row if record is not None] for row in rows]


def _load_and_measure(run: Measurement, terminal: Terminal, quiet: bool, display: ProgressDisplay) -> None:
    bench, settings = run.bench, run.bench.widest.settings
    with closing(display):
        display.loading(f"loading {settings.engine.model}")
        caches = settings.caching.cache is True and bench.asked.kind == GRID
        prompts = open_prompt_cache(bench.model, settings, bench.asked.request.home) if caches else None
        engine = bench.model.load(tiers=bench.widest.tiers, prompts=prompts).without_end()
        engine.reserve(bench.widest.length)
        level = settings.engine.quantize
        run.engine = engine.describe() + (f", weights rounded to {level}" if level else "")
        for warning in approximation_warnings(settings):
            terminal.warn(warning)
        run.agreement = warn_of_quantized_weights(bench.widest, engine, display, terminal)
        try:
            with run_status(terminal, quiet) as show:
                _measure(run, engine, display, show)
        except KeyboardInterrupt:
            run.interrupted = True
            display.hide()
        finally:
            for peer in bench.asked.peers:
                peer.close()
    if run.interrupted:
        terminal.after_ctrl_c()
        terminal.note(run.interruption())


def _measure(run: Measurement, engine: Engine, display: ProgressDisplay, show: Callable[[str], None]) -> None:
    """Run what is pending: all runs on a prompt and a context share one prefill, which extends the last one's."""
    pending = run.pending
    number = 0
    for (*_, reads_anew), rounds in groupby(pending, key=lambda each: run.place_of(each[0])):
        each = list(rounds)
        if reads_anew:  # in caches of their own
            engine.release()
            display.hide()
        else:
            widest = replace(run.bench.widest, ids=run.bench.ids(each[0][0]))
            run.prefill_s = run.reads.add(read_prompt(widest, engine, display))
        for cell, repeat in each:
            number += 1
            left = run.left(len(pending) - number + 1)
            show(f"bench · {_label(run.bench, cell)} · run {number} of {len(pending)}{left}")
            run.finish(cell, _record(run, engine, cell, repeat))


def _label(bench: OpenBench, cell: Cell) -> str:
    values = [f"{name} {value}" for name, value in cell.values if value is not None]
    has_contexts = bench.asked.kind in (GRID, LADDER)
    context = [counted(cell.context, "token")] if cell.context is not None and has_contexts else []
    context += [f"batch {cell.batch}"] if cell.batch > 1 or bench.asked.in_turn else []
    return " · ".join([cell.method, *values, *context, *([bench.prompts[cell.prompt].name] if cell.prompt else [])])


def _record(run: Measurement, engine: Engine, cell: Cell, repeat: int) -> Record:
    """Run a cell once; return it as a line of the points file."""
    bench = run.bench
    load = OtherLoad() if bench.model.group.size == 1 else None  # other ranks are not other load
    peer = bench.peer(cell)
    measured, outputs = _run(run, engine, cell) if peer is None else _run_peer(run, peer, cell)
    sampling = measured.pop("sampling", bench.cells[cell].sampling.kind)
    facts = bench.facts(cell, repeat)
    machine = {"threads": torch.get_num_threads(), "engine": run.engine, "torch": torch.__version__}
    return {
        "type": TYPE,
        **facts,
        "machine": facts["machine"] | machine,
        **versioned(),
        "sampling": sampling,
        **rounded({"other_load_cores": None if load is None else load.cores()} | measured),
        **({} if sampling == FASTEST else _comparison(run, engine, cell, outputs)),
        "tokens": outputs[0] if len(outputs) == 1 else outputs,
    }


def _run(run: Measurement, engine: Engine, cell: Cell) -> Run:
    benchmark = run.bench.benchmark(cell)
    method = benchmark.speculations[cell.method]
    if cell.batch > 1 or run.bench.asked.in_turn:
        together = run_together if cell.batch > 1 else run_in_turn
        return together(benchmark, engine, run.bench.sequences(cell), method)
    return run_once(benchmark, engine, method, run.prefill_s or 0.0)


def _run_peer(run: Measurement, peer: Peer, cell: Cell) -> Run:
    benchmark, plain = run.bench.benchmark(cell), run.finished.get(run.bench.base[cell], {})
    return run_peer(benchmark, peer, next((outputs_of(each)[0] for each in plain.values()), None))


def _comparison(run: Measurement, engine: Engine, cell: Cell, outputs: list[list[int]]) -> dict[str, Any]:
    """Return whether rounding alone explains that a run differs from its base, and the largest difference of logits.

    None where it does not differ.
    """
    bench, base = run.bench, run.bench.base[cell]
    benchmark, plain = bench.benchmark(cell), run.finished.get(base, {})
    same = {"lossless": None, "margin": None}
    if not plain or cell == base:
        return same
    expected = outputs_of(next(iter(plain.values())))
    rows = zip(bench.sequences(cell), outputs, expected, strict=False)
    differing = [(prompt, ids) for prompt, ids, plain_ids in rows if ids != plain_ids]
    if not differing:
        return same
    replays = [_replay(run, engine, benchmark, prompt, ids) for prompt, ids in differing]
    margins = [divergence.margin for replay in replays for divergence in replay.divergences]
    return {"lossless": all(replay.lossless for replay in replays), "margin": max(margins, default=None)}


def _replay(run: Measurement, engine: Engine, benchmark: Benchmark, prompt: list[int], ids: list[int]) -> Replay:
    """Return an output's comparison with plain decoding, made once: repeats and methods often share an output."""
    seed = benchmark.config.seed or 0
    key = tuple(prompt), tuple(ids), benchmark.sampling, seed
    if key not in run.replays:
        run.replays[key] = engine.replay(prompt, ids, benchmark.sampling, seed=seed)
    return run.replays[key]
