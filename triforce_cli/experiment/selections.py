"""Measures how much of the attention the selections of the middle level recover, by layer and by their age."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offload.api.opened_model import OpenModel
from offload.engine import Engine
from offload.errors import PromptError
from offload.evaluation.attention import Policy, recovered_attention
from offload.events import Prefilled
from offload.metrics import Meter
from offload.settings.config import Speculation
from offload.settings.method_sizes import sized
from offload.settings.methods import MIDDLES
from offload.speculation.passes.runner import Runner

from ..bench.axes import CONTEXT
from ..bench.prompts import first_tokens
from ..bench.quality import show_reading
from ..bench.report import Measure, Report
from ..output.format import percent
from ..output.progress import ProgressDisplay, RunFacts
from ..run.model_request import open_shared_model
from .grid import ATTENTION, IDEAL, IDEAL_ONCE, KINDS
from .overrides import ExperimentRequest
from .points import Inputs, Key, excerpts, facts_of, points_of, report_of

Rows = dict[Key, dict[str, Any]]  # measures
Run = Callable[[Runner], Generator[Prefilled, None, Rows]]

SHOWN = (Measure("recovered", "share of the attention recovered", "{:.3f}".format),)
PROFILES = (
    Measure("recovered_by_layer", "share of the attention recovered, by layer", percent),
    Measure("recovered_by_age", "share of the attention recovered, by tokens since the selection", "{:.3f}".format),
)
_AGES = 8  # parts of the scored tokens, of which the means are given


def measure_attention(inputs: Inputs) -> tuple[Report, bool]:
    """Measure every selection at each point, on each text; return and raise as `measure_texts`."""
    return measure_texts(inputs, _recovering, SHOWN, PROFILES)


def measure_texts(
    inputs: Inputs,
    run_of: Callable[[ExperimentRequest, int, Speculation, list[int]], Run],
    shown: Sequence[Measure],
    profiles: Sequence[Measure],
) -> tuple[Report, bool]:
    """Run an evaluation on each context of each text; return the rows, and whether Ctrl-C ended it.

    With torch's attention: the native kernel's blocks of 16 tokens are no chunks of 8. Raises TriforceError.
    """
    asked, own, _, terminal, display = inputs
    request = asked.request({**own, "method": "ar", "kernel": "off"})
    model = open_shared_model(request, Speculation(method="ar"), {"experiment": asked.experiment.name}, terminal, True)
    found: dict[Key, list[dict[str, Any]]] = {}
    prompts: dict[str, int] = {}
    interrupted = False
    with closing(display):
        display.loading(f"loading {request.settings.engine.model}")
        engine = model.load()
        try:
            for name, text in excerpts(inputs):
                ids = model.tokenizer.encode(text, special_tokens=True)
                for context in asked.grid.contexts or ():
                    used = first_tokens(ids, context)
                    prompts[name] = max(prompts.get(name, 0), len(used))
                    run = run_of(asked, context, request.settings.speculation, used)
                    for key, each in _evaluated(asked, model, engine, used, run, display).items():
                        found.setdefault(key, []).append({"prompt_tokens": len(used), **each})
        except KeyboardInterrupt:
            interrupted = True
            display.hide()
    if interrupted:
        terminal.after_ctrl_c()
    return report_of(asked.grid, facts_of(request.settings, engine), prompts, found, shown, profiles), interrupted


def _policies(asked: ExperimentRequest, context: int, given: Speculation, tokens: int) -> dict[Key, Policy]:
    """Return what is measured on a context: every selection at each point. Raises PromptError."""
    grid, found = asked.grid, {}
    for values in points_of(grid):
        if values[CONTEXT] != context:
            continue
        changed = {name: value for name, value in values.items() if hasattr(given, name)}
        settings = sized(replace(given, **changed), tokens)
        if tokens - grid.last < settings.budget:
            message = f"a budget of {settings.budget:,} tokens keeps all that are before the last {grid.last:,} of "
            raise PromptError(f"{message}{tokens:,}", "give a larger context")
        point = tuple((name, value) for name, value in values.items() if name in grid.varied)
        sizes = settings.budget // settings.chunk, settings.chunk, settings.rebuild_every
        for name in KINDS[ATTENTION].parse(grid.methods):
            is_ideal = name in (IDEAL, IDEAL_ONCE)
            selector = None if is_ideal else MIDDLES[name].load()(settings.sink, settings.chunk)
            found[name, point] = Policy(selector, *sizes, fixed=name == IDEAL_ONCE)
    return found


def _recovering(asked: ExperimentRequest, context: int, given: Speculation, ids: list[int]) -> Run:
    """Return what measures the shares of all policies on one text."""
    policies = _policies(asked, context, given, len(ids))

    def run(runner: Runner) -> Generator[Prefilled, None, Rows]:
        shares = yield from recovered_attention(runner, ids, asked.grid.last, policies)
        return {key: measures_of(each) for key, each in shares.items()}

    return run


def _evaluated(
    asked: ExperimentRequest, model: OpenModel, engine: Engine, ids: list[int], run: Run, display: ProgressDisplay
) -> Rows:
    meter = Meter(len(ids))
    display.start(RunFacts(asked.experiment.name, asked.grid.kind, model.checkpoint.shape.context, meter))
    engine.release()  # the selections see the queries of the whole prompt
    with closing(engine.evaluate(ids, run)) as events:
        return show_reading(events, meter, display)


def measures_of(shares: Tensor) -> dict[str, Any]:
    """Return the measures of shares `[tokens, layers]`: the mean, and those by layer and by age."""
    parts = torch.arange(len(shares)).tensor_split(min(_AGES, len(shares)))
    return {
        "recovered": float(shares.mean()),
        "recovered_by_layer": {str(layer): float(each) for layer, each in enumerate(shares.mean(0))},
        "recovered_by_age": {f"{int(part[0]) + 1}-{int(part[-1]) + 1}": float(shares[part].mean()) for part in parts},
    }
