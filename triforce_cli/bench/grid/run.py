"""The runs of a grid: each prompt is read once, then all its cells run in turn, round after round.

What is finished goes to the points file at once; a run that finds it there does not run it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from offload.engine import Engine
from offload.settings.generation import FASTEST
from offload.units import counted

from ...distributed.rank import broadcast
from ...output.format import duration, rounded
from ...output.progress import ProgressDisplay
from ...output.terminal import Terminal
from ...run.prompt_cache import open_prompt_cache
from ..batch_run import run_together
from ..benchmark import Benchmark
from ..noise import OtherLoad
from ..provenance import provenance, versioned
from ..run import prepare_copies, read_prompt, run_once, warn_of_quantized_weights
from ..run_status import run_status
from .axes import BATCH
from .batch_measures import MEASURED, of_batch
from .opened import OpenGrid, open_grid
from .records import TYPE, Cell, PointsFile, Record, by_identity, identity
from .report import GridReport
from .request import GridRequest


@dataclass(slots=True)
class GridRun:
    """A grid under way: the finished runs of each cell by their repeat, and where new ones are written."""

    grid: OpenGrid
    finished: dict[Cell, dict[int, Record]]
    file: PointsFile | None = None
    interrupted: bool = False
    engine: str = ""
    agreement: float | None = None
    _started: float = field(default_factory=time.monotonic)
    _done: int = 0

    @property
    def pending(self) -> list[tuple[Cell, int]]:
        """Return the runs to do, in order: by prompt and context, then in rounds."""
        cells = self.grid.cells
        found = []
        for _, group in groupby(cells, key=_prompt_of):
            each = list(group)
            rounds = [(cell, repeat) for repeat in range(self.grid.asked.repeats) for cell in each]
            found += [(cell, repeat) for cell, repeat in rounds if repeat not in self.finished.get(cell, {})]
        return found

    def finish(self, cell: Cell, record: Record) -> None:
        """Keep a finished run, also on disk. Raises OSError."""
        if self.file is not None:
            self.file.append(record)
        self.finished.setdefault(cell, {})[record["repeat"]] = record
        self._done += 1

    def left(self, pending: int) -> str:
        """Return the time that so many runs will take, as text; "" before the first one is done."""
        seconds = (time.monotonic() - self._started) / self._done * pending if self._done else 0
        return f" · {duration(seconds)} left" if seconds else ""

    def interruption(self) -> str:
        """Return how far an interrupted grid has come, and how it goes on."""
        asked = self.grid.asked
        done = sum(map(len, self.finished.values()))
        count = f"{done} of {counted(len(self.grid.cells) * asked.repeats, 'run')}"
        if asked.points is None:
            return f"interrupted after {count}; with --points FILE, the same command would go on after them"
        return f"interrupted; {count} saved: run the same command again to go on"

    def report(self) -> GridReport:
        """Return the report of what is finished."""
        grid, asked = self.grid, self.grid.asked
        done = {cell: [runs[repeat] for repeat in sorted(runs)] for cell, runs in self.finished.items()}
        return GridReport(self._facts(done), asked.varied, list(grid.cells), grid.base, done)

    def _facts(self, done: dict[Cell, list[Record]]) -> dict[str, Any]:
        grid, settings = self.grid, self.grid.widest.settings
        records = [record for runs in done.values() for record in runs]
        here = provenance(grid.model.device, self.engine)
        resolved = settings.described(grid.widest.sampling)
        points = [point.settings.described(point.sampling) for point in grid.cells.values()]
        differ = {name for point in points for name, value in point.items() if value != points[0][name]}
        varied = dict.fromkeys(name for name in resolved if name in differ or name in grid.asked.varied)
        resolved = {name: value for name, value in resolved.items() if name not in ("method", "stop")}
        return here | {
            "machine": records[0]["machine"] if records else here["machine"],
            "model": settings.engine.model,
            "quantize": settings.engine.quantize,
            "agreement": self.agreement,
            "prompts": [{"name": prompt.name, "tokens": len(prompt.ids)} for prompt in grid.prompts],
            BATCH: None if BATCH in grid.asked.varied else grid.asked.batches[0],
            "new_tokens": None if "max_new_tokens" in varied else settings.generation.max_new_tokens,
            "repeats": grid.asked.repeats,
            "settings": resolved | {"device": grid.model.device.type} | varied,
        }


def run_grid(asked: GridRequest, terminal: Terminal, quiet: bool, display: ProgressDisplay) -> GridRun:
    """Run what is not finished, and return all. Closes the display. Ctrl-C ends it, with what is done.

    Raises TriforceError, OSError.
    """
    grid = open_grid(asked, terminal, quiet)
    group = asked.request.group
    is_writer = asked.points is not None and (group is None or group.rank == 0)
    file = PointsFile(asked.points, terminal.warn) if is_writer else None
    try:
        # Of rank 0: what identifies a run, such as the path of the model, may differ between ranks.
        kept = broadcast(group, lambda: _found(grid, by_identity([] if file is None else file.kept)))
        finished = {cell: dict(runs) for cell, runs in zip(grid.cells, kept, strict=True) if runs}
        run = GridRun(grid, finished, file)
        if run.pending:
            _load_and_measure(run, terminal, quiet, display)
        display.close()
        return run
    finally:
        if file is not None:
            file.close()


def _found(grid: OpenGrid, records: dict[str, Record]) -> list[list[tuple[int, Record]]]:
    """Return the finished runs of each cell among the records of a file, with the number of their repeat."""
    repeats = range(grid.asked.repeats)
    rows = [[(repeat, records.get(identity(grid.facts(cell, repeat)))) for repeat in repeats] for cell in grid.cells]
    return [[(repeat, record) for repeat, record in row if record is not None] for row in rows]


def _load_and_measure(run: GridRun, terminal: Terminal, quiet: bool, display: ProgressDisplay) -> None:
    grid, settings = run.grid, run.grid.widest.settings
    with closing(display):
        display.loading(f"loading {settings.engine.model}")
        caches = settings.caching.cache is True
        prompts = open_prompt_cache(grid.model, settings, grid.asked.request.home) if caches else None
        engine = grid.model.load(tiers=grid.widest.tiers, prompts=prompts).without_end()
        engine.reserve(grid.widest.length)
        run.engine = engine.describe()
        run.agreement = warn_of_quantized_weights(grid.widest, engine, display, terminal)
        try:
            with run_status(terminal, quiet) as show:
                prepare_copies(grid.widest, engine, display)
                _measure(run, engine, display, show)
        except KeyboardInterrupt:
            run.interrupted = True
            display.hide()
    if run.interrupted:
        terminal.after_ctrl_c()
        terminal.note(run.interruption())


def _measure(run: GridRun, engine: Engine, display: ProgressDisplay, show: Callable[[str], None]) -> None:
    """Run what is pending: all runs on a prompt and a context share one prefill, which extends the last one's."""
    pending = run.pending
    number = 0
    for _, rounds in groupby(pending, key=lambda each: _prompt_of(each[0])):
        each = list(rounds)
        if each[0][0].batch > 1:  # whose sequences have caches of their own
            engine.release()
            display.hide()
        else:
            widest = replace(run.grid.widest, ids=run.grid.ids(each[0][0]))
            read_prompt(widest, engine, display)
        for cell, repeat in each:
            number += 1
            left = run.left(len(pending) - number + 1)
            show(f"bench · {_label(run.grid, cell)} · run {number} of {len(pending)}{left}")
            run.finish(cell, _record(run, engine, cell, repeat))


def _prompt_of(cell: Cell) -> tuple[int, int | None, bool]:
    return cell.prompt, cell.context, cell.batch > 1


def _label(grid: OpenGrid, cell: Cell) -> str:
    values = [f"{name} {value}" for name, value in cell.values if value is not None]
    context = [] if cell.context is None else [counted(cell.context, "token")]
    context += [f"batch {cell.batch}"] if cell.batch > 1 else []
    return " · ".join([cell.method, *values, *context, *([grid.prompts[cell.prompt].name] if cell.prompt else [])])


def _record(run: GridRun, engine: Engine, cell: Cell, repeat: int) -> Record:
    """Run a cell once; return it as a line of the points file."""
    grid = run.grid
    benchmark = grid.benchmark(cell)
    load = OtherLoad() if grid.model.group.size == 1 else None  # other ranks are not other load
    measured, outputs = _run(grid, benchmark, engine, cell)
    facts = grid.facts(cell, repeat)
    machine = {"threads": torch.get_num_threads(), "engine": run.engine, "torch": torch.__version__}
    return {
        "type": TYPE,
        **facts,
        "machine": facts["machine"] | machine,
        **versioned(),
        "sampling": benchmark.sampling.kind,
        **rounded(measured | {"other_load_cores": None if load is None else load.cores()}),
        "lossless": _is_lossless(run, engine, cell, outputs),
        "tokens": _tokens(outputs),
    }


def _run(grid: OpenGrid, benchmark: Benchmark, engine: Engine, cell: Cell) -> tuple[dict[str, Any], list[list[int]]]:
    """Run a cell once; return the measures by name, and the tokens of each sequence."""
    method = benchmark.speculations[cell.method]
    if cell.batch > 1:
        summaries, sample = run_together(benchmark, engine, grid.sequences(cell), method)
        return of_batch(summaries, sample), [list(ids) for ids in sample.outputs]
    sample = run_once(benchmark, engine, method, 0.0)
    return {name: getattr(sample.summary, name) for name in MEASURED}, [list(sample.ids)]


def _tokens(outputs: list[list[int]]) -> list[int] | list[list[int]]:
    """Return the tokens of a run as its record has them: of one sequence, they alone."""
    return outputs[0] if len(outputs) == 1 else outputs


def _is_lossless(run: GridRun, engine: Engine, cell: Cell, outputs: list[list[int]]) -> bool | None:
    """Return whether rounding alone explains that a run differs from plain decoding; None where it does not differ."""
    benchmark, plain = run.grid.benchmark(cell), run.finished.get(run.grid.base[cell], {})
    if benchmark.sampling.kind == FASTEST or not plain or cell == run.grid.base[cell]:
        return None
    expected = _ids(plain.values())
    if expected == _tokens(outputs):
        return None
    seed = benchmark.config.seed or 0
    pairs = zip(run.grid.sequences(cell), outputs, expected if cell.batch > 1 else [expected], strict=True)
    differing = [(prompt, ids) for prompt, ids, plain_ids in pairs if ids != plain_ids]
    return all(engine.replay(prompt, ids, benchmark.sampling, seed=seed).lossless for prompt, ids in differing)


def _ids(records: Any) -> Sequence[int]:
    return next(iter(records))["tokens"]
