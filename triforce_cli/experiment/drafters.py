"""Measures drafters of one target on the same texts: acceptance by depth, tokens a verification, time and memory."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from offload.api.opened_model import OpenModel
from offload.engine import Engine
from offload.events import LevelStatistics, Prefilled
from offload.level_metrics import FULL
from offload.metrics import Meter, Summary
from offload.settings.config import SELF_DRAFTS, GenerationConfig, Sampling, Speculation
from offload.settings.methods import LOOKUP

from ..bench.axes import CONTEXT
from ..bench.compared import BASE
from ..bench.positions import Positions
from ..bench.prompts import first_tokens
from ..bench.report import Measure, Report
from ..options.settings import Settings
from ..output.format import percent
from ..output.progress import ProgressDisplay, RunFacts
from ..run.model_request import open_shared_model
from .grid import DRAFTERS, KINDS
from .overrides import ExperimentRequest
from .points import Inputs, Key, excerpts, facts_of, points_of, report_of

DEPTH = 4  # tokens of the drafts whose acceptance is measured by depth
SHOWN = (
    Measure("speedup", "speedup over ar", "{:.2f}".format),
    Measure("tbt_ms", "ms a token", "{:.2f}".format),
    Measure("tokens_per_verification", "tokens/verification", "{:.2f}".format),
    Measure("draft_ms", "ms a drafted token", "{:.2f}".format),
    Measure("memory_mib", "MiB of caches and drafter", "{:,.0f}".format),
)
PROFILES = (Measure("acceptance_by_depth", "acceptance by depth, those before being accepted", percent),)


def measure_drafters(inputs: Inputs) -> tuple[Report, bool]:
    """Run the drafters that the command line or the experiment names, one after the other, each with its own engine.

    Returns the rows, and whether Ctrl-C ended it. Raises TriforceError.
    """
    asked, own, _, terminal, display = inputs
    named = asked.given.get("draft")
    listed = asked.grid.methods if named is None else [each.strip() for each in named.split(",")]
    names = KINDS[DRAFTERS].parse(listed)
    asked = replace(asked, flags={name: each for name, each in asked.flags.items() if name != "draft"})
    found: dict[Key, list[dict[str, Any]]] = {}
    prompts: dict[str, int] = {}
    facts: dict[str, Any] = {}
    interrupted = False
    with closing(display):
        try:
            for name in names:
                drafting = {"method": _method_of(name)} | ({} if name == BASE else {"draft": name})
                request = asked.request({**own, **drafting})
                settings, compared = request.settings, {"experiment": asked.experiment.name}
                model = open_shared_model(request, settings.speculation, compared, terminal, True)
                display.loading(f"loading {name}")
                engine = model.load().without_end()
                facts = facts or facts_of(settings, engine, settings.generation.max_new_tokens)
                for text, ids in _texts(inputs, model):
                    prompts[text] = max(prompts.get(text, 0), len(ids))
                    for point, each in _points(asked, own, drafting, ids):
                        row = _measured(name, model, engine, ids, each, display)
                        found.setdefault((name, point), []).append(row)
        except KeyboardInterrupt:
            interrupted = True
            display.hide()
    if interrupted:
        terminal.after_ctrl_c()
    for (_, point), rows in found.items():
        for row, plain in zip(rows, found.get((BASE, point), ()), strict=False):
            row["speedup"] = plain["tbt_ms"] / row["tbt_ms"] if row["tbt_ms"] and plain["tbt_ms"] else None
    return report_of(asked.grid, facts, prompts, found, SHOWN, PROFILES), interrupted


def _method_of(drafter: str) -> str:
    """Return the method in which a drafter drafts for the full cache; that of the model itself, for retrieval's."""
    return {BASE: "ar", LOOKUP: "lookup", **dict.fromkeys(SELF_DRAFTS, "retrieval")}.get(drafter, "naive")


def _texts(inputs: Inputs, model: OpenModel) -> Iterator[tuple[str, list[int]]]:
    """Yield the tokens of each text in each context, the longest last: it goes on behind the shorter one."""
    for name, text in excerpts(inputs):
        ids = model.tokenizer.encode(text, special_tokens=True)
        for context in sorted(inputs.asked.grid.contexts or ()):
            yield name, first_tokens(ids, context)


def _points(
    asked: ExperimentRequest, own: Mapping[str, Any], drafting: Mapping[str, Any], ids: list[int]
) -> Iterator[tuple[tuple[tuple[str, Any], ...], Settings]]:
    """Yield what varies at each point of a context of `ids`, and its settings."""
    for values in points_of(asked.grid):
        if values[CONTEXT] == len(ids):
            more = {name: value for name, value in values.items() if name != CONTEXT}
            point = tuple((name, value) for name, value in values.items() if name in asked.grid.varied)
            yield point, asked.request({**own, **more, **drafting}).settings


def _measured(
    name: str, model: OpenModel, engine: Engine, ids: list[int], settings: Settings, display: ProgressDisplay
) -> dict[str, Any]:
    """Return the measures of a drafter on one text: of drafts of the best length, and by depth of long ones."""
    sampling, method = settings.sampling(model.sampling), settings.speculation
    run = engine, ids, sampling, settings.generation, display
    _run(*run, method, 1)  # reads the prompt
    _, summary, levels = _run(*run, method)
    accepted = _run(*run, replace(method, gamma2=DEPTH))[0] if name != BASE else {}
    need = replace(model, speculation=method).estimate(len(ids) + settings.generation.max_new_tokens)
    drafted = sum(row.drafted for row in levels)
    return {
        "prompt_tokens": len(ids),
        "speedup": None,
        "tbt_ms": None if not summary.tokens_per_s else 1e3 / summary.tokens_per_s,
        "tokens_per_verification": summary.tokens_per_verification,
        "draft_ms": 1e3 * sum(row.draft_s for row in levels if row.drafted) / drafted if drafted else None,
        "memory_mib": (need.kv + need.retrieval + need.draft + need.copy) / 2**20,
        "acceptance_by_depth": accepted,
    }


def _run(
    engine: Engine,
    ids: list[int],
    sampling: Sampling,
    config: GenerationConfig,
    display: ProgressDisplay,
    method: Speculation,
    tokens: int | None = None,
) -> tuple[dict[str, float], Summary, Sequence[LevelStatistics]]:
    """Generate once; return the acceptance by depth, the summary and the target's statistics."""
    config = config if tokens is None else replace(config, max_new_tokens=tokens)
    meter = Meter(len(ids))
    display.start(RunFacts(method.draft, method.method, engine.model.shape.context, meter))
    positions = Positions()
    with closing(engine.generate(ids, sampling, config, method)) as events:
        for event in positions.watch(meter.watch(events)):
            if isinstance(event, Prefilled):
                display.event(event)
                if event.done == event.total:
                    display.hide()  # a bar would take time from what is measured
    levels = [row for row in meter.levels if row.verifier == FULL]
    rates = {str(depth): accepted / verified for depth, (verified, accepted) in enumerate(positions.in_draft, 1)}
    return rates, meter.summary("length", method=method.method), levels
