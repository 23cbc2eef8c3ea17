"""The runs of `bench --quality`: the exact model first, then each mode against it."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any, TypeVar

from offload.engine import Engine
from offload.evaluation.needles import NeedleScore, score_needle
from offload.evaluation.teacher_forcing import (
    Predictor,
    Recomputed,
    TextScores,
    continue_greedily,
    mean_divergence,
    perplexities,
    perplexity,
    score_text,
    top1_agreement,
)
from offload.events import Prefilled, Tokens
from offload.metrics import Meter
from offload.sequence import common_prefix
from offload.settings.config import GenerationConfig, Sampling
from offload.speculation.passes.runner import Runner

from ..output.progress import ProgressDisplay, RunFacts
from ..output.terminal import Terminal
from ..run.processor import OtherLoad
from .benchmark import BenchOutput
from .compared import EXACT
from .quality_modes import ModeEngines, OpenMode, QualityRequest, QualityRun, open_quality_run
from .report import QUALITY, Report, mean_of, provenance

PARTS = 8  # of the scored tokens, whose perplexities are given one by one
_Result = TypeVar("_Result")
_Evaluated = Generator[Prefilled, None, _Result]


@dataclass(frozen=True, slots=True)
class ModeQuality:
    """What was measured of a mode.

    `output` are the tokens of greedy decoding after the text; `weights_bytes` and `kv_bytes` are estimates, `prefill_s`
    the seconds of reading the text, `other_load` the cores that other processes used meanwhile.
    """

    mode: str
    scores: TextScores
    output: tuple[int, ...]
    needles: tuple[NeedleScore, ...]
    weights_bytes: int
    kv_bytes: int
    prefill_s: float
    other_load: float | None = None


@dataclass(frozen=True, slots=True)
class QualityFound:
    """The modes that were measured, the exact one first if it ran; `facts` describe the machine and the request."""

    facts: Mapping[str, Any]
    modes: Sequence[ModeQuality]
    interrupted: bool = False

    def report(self) -> Report:
        """Return the report, with a row of numbers for each mode."""
        load = mean_of(mode.other_load for mode in self.modes)
        exact = next((mode for mode in self.modes if mode.mode == EXACT), None)
        return Report(QUALITY, self.facts, [_row(each, exact) for each in self.modes], other_load=load)


def _row(one: ModeQuality, exact: ModeQuality | None) -> dict[str, Any]:
    """Return a mode's row; what compares it with the exact one is None if that did not run."""
    placed = [needle for needle in one.needles if needle.depth is not None]
    absent = [needle.log_prob for needle in one.needles if needle.depth is None]
    by_position = perplexities(one.scores.log_probs, PARTS)
    return {
        "mode": one.mode,
        "perplexity": perplexity(one.scores.log_probs),
        "perplexity_by_position": [{"from": first, "to": end, "perplexity": each} for first, end, each in by_position],
        "kl": 0.0 if one is exact else mean_divergence(one.scores),
        "top1_agreement": None if exact is None else top1_agreement(exact.scores, one.scores),
        "equal_tokens": None if exact is None else common_prefix(exact.output, one.output),
        "needles_found": sum(needle.found for needle in placed) if placed else None,
        "needle_log_prob": mean(needle.log_prob for needle in placed) if placed else None,
        "needle_log_prob_absent": absent[0] if absent else None,
        "needles": [asdict(needle) for needle in placed],
        "token_s": float(one.scores.seconds.median()),
        "prefill_s": one.prefill_s,
        "weights_bytes": one.weights_bytes,
        "kv_bytes": one.kv_bytes,
        "log_probs": one.scores.log_probs.tolist(),
        "output": list(one.output),
    }


def run_quality(asked: QualityRequest, terminal: Terminal, output: BenchOutput, display: ProgressDisplay) -> int:
    """Measure every mode and write the report; return the exit code. Closes the display.

    Ctrl-C writes the modes that are done. Raises TriforceError, OSError.
    """
    run, request = open_quality_run(asked, terminal, output.quiet), asked.request
    if request.dry_run:
        exact = run.modes[0]
        return output.plan(exact.model, exact.settings, run.length, request, terminal, display)
    found = measure_modes(run, terminal, display)
    return output.write(found.report(), terminal, found.interrupted, request.is_first)


def measure_modes(
    run: QualityRun, terminal: Terminal, display: ProgressDisplay, exact: ModeQuality | None = None
) -> QualityFound:
    """Measure every mode; return those that are done, also where Ctrl-C ended it. Closes the display.

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
    return QualityFound(measured.facts(), measured.done, interrupted)


class _Measurement:
    """Loads and measures one mode after the other; the first one's scores are the reference of the others."""

    def __init__(self, run: QualityRun, display: ProgressDisplay, exact: ModeQuality | None = None) -> None:
        self.done: list[ModeQuality] = [] if exact is None else [exact]
        self._run, self._display = run, display
        self._engines = ModeEngines(display)

    def measure(self, mode: OpenMode) -> None:
        """Measure a mode: scores of the text, greedy decoding after it, then the needles."""
        run, engine = self._run, self._engines.load(mode, self._run.length)
        load = OtherLoad() if mode.model.group.size == 1 else None  # other ranks are not other load
        reference = self.done[0].scores if self.done and self.done[0].mode == EXACT else None
        is_exact = mode.name == EXACT
        started = time.perf_counter()
        scores = self._evaluate(
            engine, mode, run.ids, lambda runner: score_text(runner, run.ids, run.last, is_exact, reference)
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
        memory, cores = (need.weights, need.kv), None if load is None else load.cores()
        self.done.append(ModeQuality(mode.name, scores, output, needles, *memory, prefill_s, cores))

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
            return show_reading(events, meter, self._display)

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
        first = run.modes[0]
        resolved = first.settings.described(Sampling(temperature=0)) | {"device": first.model.device.type}
        del resolved["method"], resolved["stop"]
        return provenance(first.model.device, self._engines.described) | {
            "model": first.settings.engine.model,
            "text_tokens": len(run.ids),
            "scored_tokens": run.last,
            "new_tokens": run.new_tokens,
            "left_out": dict(run.left_out),
            "settings": resolved,
        }


def show_reading(events: Generator[Prefilled, None, _Result], meter: Meter, display: ProgressDisplay) -> _Result:
    """Show the events of reading; return the generator's result."""
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            display.hide()
            return end.value
        for each in meter.watch([event]):
            display.event(each)
        if event.done == event.total:
            display.hide()  # a bar would take time from what is measured
