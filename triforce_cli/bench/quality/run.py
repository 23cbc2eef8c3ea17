"""The runs of `bench --quality`: the exact model first, then each mode against it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar

from offload.engine import Engine
from offload.evaluation import Predictor, Recomputed, continue_greedily, score_needle, score_text
from offload.events import Prefilled, Tokens
from offload.metrics import Meter
from offload.settings.config import GenerationConfig, Sampling
from offload.speculation.passes.runner import Runner

from ...exit_codes import DONE, INTERRUPTED
from ...output.plan import print_plan
from ...output.progress import ProgressDisplay, RunFacts
from ...output.stdout_formats import json_line
from ...output.terminal import Terminal
from ...run.plan import plan_run
from ..provenance import provenance
from ..run import BenchOutput
from .plot import plot
from .report import ModeQuality, QualityReport
from .request import OpenMode, QualityRequest, QualityRun, open_quality_run
from .table import report_text

_Result = TypeVar("_Result")
_Evaluated = Generator[Prefilled, None, _Result]


def run_quality(asked: QualityRequest, terminal: Terminal, output: BenchOutput, display: ProgressDisplay) -> int:
    """Measure every mode and write the report; return the exit code. Closes the display.

    Ctrl-C writes the modes that are done. Raises TriforceError, BrokenPipeError.
    """
    run = open_quality_run(asked, terminal, output.quiet)
    if asked.request.dry_run:
        exact = run.modes[0]
        plan = plan_run(exact.model, exact.settings, run.length, terminal)
        display.close()  # the plan is the output
        return print_plan(replace(plan, arguments=asked.request.arguments), "bench", terminal, output.json)
    report, interrupted = measure_modes(run, terminal, display)
    _write(report, terminal, output, interrupted)
    return INTERRUPTED if interrupted else DONE


def measure_modes(
    run: QualityRun, terminal: Terminal, display: ProgressDisplay, exact: ModeQuality | None = None
) -> tuple[QualityReport, bool]:
    """Measure every mode; return the report of those that are done, and whether Ctrl-C ended it. Closes the display.

    `exact` is what was measured of the exact mode on the same text, if it was: then it is not run again.
    """
    measured = _Measurement(run, display, exact)
    interrupted = False
    with closing(display):
        try:
            for mode in run.modes[len(measured.done) :]:
                measured.measure(mode)
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        terminal.after_ctrl_c()
    return QualityReport(measured.facts(), measured.done), interrupted


def _write(report: QualityReport, terminal: Terminal, output: BenchOutput, interrupted: bool) -> None:
    if output.json:
        terminal.write(json_line(**report.as_json(interrupted)))
    elif report.modes:
        terminal.print(report_text(report, terminal.table_width))
    if output.plot is not None and report.modes:
        plot(output.plot, report)


class _Measurement:
    """Loads and measures one mode after the other; the first one's scores are the reference of the others."""

    def __init__(self, run: QualityRun, display: ProgressDisplay, exact: ModeQuality | None = None) -> None:
        self.done: list[ModeQuality] = [] if exact is None else [exact]
        self._run, self._display = run, display
        self._engine: Engine | None = None
        self._loaded: OpenMode | None = None
        self._described = ""

    def measure(self, mode: OpenMode) -> None:
        """Measure a mode: scores of the text, greedy decoding after it, then the needles."""
        run, engine = self._run, self._load(mode)
        reference = self.done[0].scores if self.done else None
        started = time.perf_counter()
        scores = self._evaluate(
            engine, mode, run.ids, lambda runner: score_text(runner, run.ids, run.last, reference is None, reference)
        )
        prefill_s = time.perf_counter() - started - float(scores.seconds.sum())
        output = self._decode(engine, mode)
        needles = tuple(
            self._evaluate(
                engine, mode, [*each.prompt, *each.answer], lambda runner, each=each: score_needle(runner, each)
            )
            for each in run.needles
        )
        need = mode.model.estimate(mode.stored(run.length))
        self.done.append(ModeQuality(mode.name, scores, output, needles, need.weights, need.kv, prefill_s))

    def _load(self, mode: OpenMode) -> Engine:
        """Return the mode's engine: the last one if it serves, with empty caches."""
        last = self._loaded
        if last is not None and (last.settings.engine, last.tiers) == (mode.settings.engine, mode.tiers):
            self._engine.release()
        else:
            self._engine = self._loaded = None  # free its memory first
            self._display.loading(f"{mode.name} · loading {mode.settings.engine.model}")
            self._engine, self._loaded = mode.model.load(tiers=mode.tiers).without_end(), mode
        self._engine.reserve(mode.longest(self._run.length))
        self._described = self._described or self._engine.describe()
        return self._engine

    def _evaluate(
        self,
        engine: Engine,
        mode: OpenMode,
        ids: list[int],
        evaluation: Callable[[Predictor], _Evaluated[_Result]],
        more: int = 0,
    ) -> _Result:
        """Return the result of an evaluation of what the mode predicts with, over `ids` and `more` tokens at most."""
        window, meter = mode.recomputed, Meter(len(ids))
        longest = mode.longest(len(ids) + more)
        ids = ids[:longest]
        context = mode.model.checkpoint.shape.context
        facts = RunFacts(mode.settings.engine.model, mode.name, context, meter, label=mode.name)
        self._display.start(replace(facts, pass_tokens=lambda: engine.model.pass_tokens))

        def run(runner: Runner) -> _Evaluated[_Result]:
            return evaluation(runner if window is None else Recomputed(runner, window))

        with closing(engine.evaluate(ids, run, mode.speculation, longest - len(ids))) as events:
            return self._shown(events, meter)

    def _shown(self, events: Generator[Prefilled, None, _Result], meter: Meter) -> _Result:
        """Show the events of reading; return the generator's result."""
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                return end.value
            for each in meter.watch([event]):
                self._display.event(each)
            if event.done == event.total:
                self._display.hide()  # a bar would take time from what is measured

    def _decode(self, engine: Engine, mode: OpenMode) -> tuple[int, ...]:
        """Return the tokens of greedy decoding after the text, whose last token alone is not in the cache."""
        if mode.recomputed is not None:
            ids, count = self._run.ids, self._run.new_tokens
            return self._evaluate(engine, mode, ids, lambda predictor: continue_greedily(predictor, ids, count), count)
        config = GenerationConfig(max_new_tokens=self._run.new_tokens, seed=0)
        with closing(engine.generate(self._run.ids, Sampling(temperature=0), config, mode.speculation)) as events:
            return tuple(token for event in events if isinstance(event, Tokens) for token in event.ids)

    def facts(self) -> dict[str, Any]:
        """Return the machine and the request, for the report."""
        run = self._run
        exact = run.modes[0]
        resolved = exact.settings.described(Sampling(temperature=0)) | {"device": exact.model.device.type}
        del resolved["method"], resolved["stop"]
        return provenance(exact.model.device, self._described) | {
            "model": exact.settings.engine.model,
            "text_tokens": len(run.ids),
            "scored_tokens": run.last,
            "new_tokens": run.new_tokens,
            "left_out": dict(run.left_out),
            "settings": resolved,
        }
