"""Measures a benchmark: each prompt is read once, then all methods run on it in rounds, so that what disturbs the
machine for a while affects all of them."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import product
from typing import Any

from rich.text import Text

from offload.engine import Engine
from offload.events import Prefilled
from offload.metrics import Meter
from offload.settings.config import Sampling, Speculation
from offload.settings.generation import FASTEST
from offload.settings.method_sizes import tree_nodes

from ..options.checks import approximation_warnings
from ..output.plan_text import print_plan
from ..output.progress import ProgressDisplay, RunFacts
from ..output.stdout_formats import json_line
from ..output.terminal import Terminal
from ..run.plan import plan_run
from ..signals import DONE, INTERRUPTED
from .methods import BASE
from .opened import BenchRequest, OpenBench, open_bench
from .report import Cell, Report, Run, provenance, report_text


def run_bench(asked: BenchRequest, terminal: Terminal, as_json: bool, quiet: bool, display: ProgressDisplay) -> int:
    """Run the benchmark and write its report; return the exit code. Ctrl-C ends it with what is done.

    Closes the display. Raises TriforceError, OSError.
    """
    request = asked.request
    bench = open_bench(asked, terminal, quiet)
    if request.dry_run:
        found = plan_run(bench.model, request.settings, bench.longest, terminal)
        display.close()  # the plan is the output
        return print_plan(replace(found, arguments=request.words), request.command, terminal, as_json)
    with closing(display):
        display.loading(f"loading {request.settings.engine.model}")
        engine = bench.model.load(tiers=bench.tiers).without_end()
        engine.reserve(bench.longest)
        for warning in approximation_warnings(request.settings):
            terminal.warn(warning)
        report = Report(_facts(bench, engine))
        try:
            for cell, run in _Rounds(bench, engine, display):
                report.cells.setdefault(cell, []).append(run)
        except KeyboardInterrupt:
            report.interrupted = True
            display.hide()
    if report.interrupted:
        terminal.after_ctrl_c()
    if as_json:
        terminal.write(json_line(**report.as_json()))
    elif report.cells:
        terminal.print(report_text(report, terminal.table_width))
    return INTERRUPTED if report.interrupted else DONE


def _facts(bench: OpenBench, engine: Engine) -> dict[str, Any]:
    """Return the machine and the request, for the report."""
    settings = bench.asked.request.settings
    described = settings.described(next(iter(bench.samplings.values())))
    return provenance(bench.model.device, engine.describe()) | {
        "model": settings.engine.model,
        "new_tokens": settings.generation.max_new_tokens,
        "repeats": bench.asked.repeats,
        "settings": {name: value for name, value in described.items() if name not in ("method", "stop")},
    }


class _Rounds:
    """Runs every cell of a benchmark, and yields each run with its cell."""

    def __init__(self, bench: OpenBench, engine: Engine, display: ProgressDisplay) -> None:
        self._bench, self._engine, self._display = bench, engine, display
        self._config = bench.asked.request.settings.generation
        self._plain: dict[tuple[int, float], list[int]] = {}  # what plain decoding has emitted
        self._verdicts: dict[tuple[int, float, tuple[int, ...]], tuple[bool, float | None]] = {}

    def __iter__(self) -> Iterator[tuple[Cell, Run]]:
        bench, read_s, number = self._bench, 0.0, 0
        count = len(bench.contexts) * len(bench.samplings) * len(bench.methods) * bench.asked.repeats
        try:
            for context in bench.contexts:  # a longer one goes on from the one before
                read_s += self._read(context)
                for _, temperature, name in product(range(bench.asked.repeats), bench.samplings, bench.methods):
                    number += 1
                    self._show(f"bench · {context:,} tokens · T {temperature:g} · {name} · run {number} of {count}")
                    yield Cell(context, temperature, name), self._run(context, temperature, name, read_s)
        finally:
            self._display.hide()

    def _show(self, text: str) -> None:
        """Show what runs. It is drawn once a run: a spinner would take time from what is measured."""
        self._display.status(lambda: Text(text), live=False)

    def _read(self, context: int) -> float:
        """Read a prompt into the caches that all its runs share; return the seconds of what was not there before."""
        bench, engine, meter = self._bench, self._engine, Meter(context)
        self._display.start(RunFacts(meter, pass_tokens=lambda: engine.model.pass_tokens))
        # The session gets room for the largest tree of all methods.
        method = replace(bench.methods[BASE], tree=max(bench.methods.values(), key=tree_nodes).tree)
        with closing(self._generate(context, next(iter(bench.samplings.values())), method)) as events:
            for event in meter.watch(events):
                self._display.event(event)
                if isinstance(event, Prefilled) and event.done == event.total:
                    break
        self._display.hide()
        return meter.prefill_s or 0.0

    def _generate(self, context: int, sampling: Sampling, method: Speculation) -> Any:
        return self._engine.generate(self._bench.ids[:context], sampling, self._config, method)

    def _run(self, context: int, temperature: float, name: str, read_s: float) -> Run:
        """Generate once. The prompt is in the caches but for its last token, whose time is in `read_s` already."""
        bench, meter = self._bench, Meter(context)
        sampling, method = bench.samplings[temperature], bench.methods[name]
        started = time.perf_counter()
        with closing(self._generate(context, sampling, method)) as events:
            for _ in meter.watch(events):
                pass
        seconds = time.perf_counter() - started
        summary = meter.summary("length", method=method.method)
        ids = list(meter.ids)
        equal, lossless, margin = self._compare(context, temperature, name, ids)
        ttft_s = read_s + (summary.ttft_s or 0) - (summary.prefill_s or 0)
        memory = bench.memory_of(method, context)
        return Run(summary, ids, ttft_s, seconds, memory, equal, lossless, margin)

    def _compare(
        self, context: int, temperature: float, name: str, ids: list[int]
    ) -> tuple[int | None, bool | None, float | None]:
        """Return where an output leaves plain decoding's, whether rounding alone explains that, and by how much.

        None for plain decoding itself, and for draws that depend on the method.
        """
        sampling = self._bench.samplings[temperature]
        plain = self._plain.setdefault((context, temperature), ids)
        if name == BASE or sampling.kind == FASTEST or plain == ids:
            return None, None, None
        at = next((i for i, pair in enumerate(zip(plain, ids, strict=False)) if pair[0] != pair[1]), len(ids))
        key = (context, temperature, tuple(ids))
        if key not in self._verdicts:  # repeats and methods often share an output
            prompt, seed = self._bench.ids[:context], self._config.seed or 0
            found = self._engine.replay(prompt, ids, sampling, seed=seed)
            self._verdicts[key] = found.lossless, max((each.margin for each in found.divergences), default=None)
        return at, *self._verdicts[key]
