"""Runs what is not finished of an evaluation; every answer goes to the points file at once, with its score."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload.api.opened_model import OpenModel
from offload.errors import PromptError, TriforceError
from offload.evaluation.tasks.task import Item
from offload.units import counted

from ..bench.axes import Grouped
from ..bench.cells import PointsFile, Record, Weights, digest, identity, weights_of
from ..bench.compared import EXACT
from ..bench.quality_modes import ModeEngines, OpenMode, fitted, open_modes, with_tiers
from ..bench.report import provenance, versioned
from ..bench.runs import run_status
from ..output.format import duration, rounded
from ..output.progress import ProgressDisplay
from ..output.terminal import Terminal
from ..run.model_request import open_request
from ..run.openai_client import is_endpoint
from ..run.processor import processor
from .report import Evaluation
from .request import CHATTY, MAP_REDUCE, EvaluateRequest, ids_of, is_map_reduce, make_items, part_of
from .targets import Endpoint, MapReduceTarget, ModeTarget, Target

TYPE = "evaluation_run"
_IDENTIFYING = ("mode", "task", "length", "depth", "seed", "prompt_sha256", "settings")
_KINDS = {
    **dict.fromkeys(("mode", "task", "output", "prompt_sha256"), str),
    **dict.fromkeys(("length", "seed", "prompt_tokens"), int),
    **{"score": float | int, "depth": float | int | None, "settings": dict, "machine": dict},
}
Emit = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class OpenEvaluation:
    """What answers, and what is asked: the items, and the tokens of their prompts."""

    model: OpenModel
    targets: list[Target]
    items: list[Item]
    ids: list[list[int]]
    engines: ModeEngines


def open_evaluation(
    asked: EvaluateRequest, terminal: Terminal, quiet: bool, display: ProgressDisplay
) -> OpenEvaluation:
    """Open the model in each mode, and make the items. Raises TriforceError."""
    compared = {"tasks": asked.tasks, "modes": asked.modes, "lengths": asked.lengths, "depths": asked.depths}
    names = asked.local or (EXACT,)
    modes, left_out = open_modes(names, asked.are_named, asked.request, compared, terminal, quiet)
    exact = modes[EXACT]
    longest = max(asked.lengths) + (CHATTY if asked.is_chat else 0)
    modes = _fitted(asked, modes, longest, left_out, terminal)  # before long items are made in vain
    items, ids = [], []
    for item in make_items(asked, tokenizer := exact.model.tokenizer, display.loading):
        items.append(item)
        ids.append(ids_of(tokenizer, item, asked.is_chat))
    for mode, reason in left_out.items():
        terminal.warn(f"{mode} is left out: {reason}")
    has_file = asked.points is not None and bool(asked.local)
    weights = weights_of(exact.model, asked.request.home) if has_file else Weights()
    engines = ModeEngines(display)
    targets: list[Target] = []
    for name in asked.modes:
        if is_endpoint(name):
            targets.append(Endpoint(name, asked.is_chat))
        elif is_map_reduce(name):
            whole = min(longest, exact.model.checkpoint.shape.context)
            base = ModeTarget(with_tiers(exact, whole, terminal), engines, weights, whole, True)
            opened = open_request(asked.request, terminal, quiet)
            targets.append(MapReduceTarget(name, base, part_of(name), opened, asked.request.home, terminal))
        elif name in modes:
            targets.append(ModeTarget(modes[name], engines, weights, longest, asked.is_chat))
    return OpenEvaluation(exact.model, targets, items, ids, engines)


def _fitted(
    asked: EvaluateRequest, modes: Mapping[str, OpenMode], longest: int, left_out: dict[str, str], terminal: Terminal
) -> dict[str, OpenMode]:
    """Return the modes that run the longest item; where it exceeds the context, map-reduce may run alone."""
    if not asked.local:
        return {}
    try:
        return fitted(modes, replace(asked.request, dry_run=False), longest, 0, left_out, terminal)
    except PromptError as error:
        if asked.local != (EXACT,) or not any(map(is_map_reduce, asked.modes)):
            meant = f"; {length.hint}" if isinstance(length := max(asked.lengths), Grouped) else ""
            raise PromptError(error.message, f"shorter ones by --context, or --modes {MAP_REDUCE}{meant}") from None
        left_out[EXACT] = error.message
        return {}


def run_evaluation(
    asked: EvaluateRequest, terminal: Terminal, quiet: bool, display: ProgressDisplay, emit: Emit
) -> Evaluation:
    """Have every item answered by every mode; return all scores, also where Ctrl-C ended it. Closes the display.

    `emit` is given each record, as soon as there is one. A mode ends with its first error, which is among the report's
    `errors`. Raises TriforceError, OSError.
    """
    path = asked.points
    file = None if path is None else PointsFile(path, terminal.warn, TYPE, "answer of an evaluation", _KINDS)
    try:
        opened = open_evaluation(asked, terminal, quiet, display)
        kept = {} if file is None else {identity(record, _IDENTIFYING): record for record in file.kept}
        found, errors, interrupted = list[Record](), list[TriforceError](), False
        try:
            with run_status(terminal, quiet) as show:
                for record in _records(opened, kept, file, show, errors):
                    found.append(record)
                    emit(record)
        except KeyboardInterrupt:
            interrupted = True
        display.close()
        if interrupted:
            terminal.after_ctrl_c()
            saved = f"{counted(len(found), 'answer')} saved: run the same command again to go on"
            terminal.note(f"interrupted; {saved}" if path else "interrupted; with --points FILE, it could go on")
        here = provenance(opened.model.device, opened.engines.described)
        return Evaluation(asked, here | {"model": asked.request.settings.engine.model}, found, interrupted, errors)
    finally:
        if file is not None:
            file.close()


def _records(
    opened: OpenEvaluation,
    kept: dict[str, Record],
    file: PointsFile | None,
    show: Callable[[str], None],
    errors: list[TriforceError],
) -> Iterable[Record]:
    """Yield the record of each target and item: one that was kept, or a new one, which is then in the file.

    The error that ended a target is added to `errors`.
    """
    pending = {
        target.name: [facts for facts in _facts(opened, target) if identity(facts, _IDENTIFYING) not in kept]
        for target in opened.targets
    }
    left, done, started = sum(map(len, pending.values())), 0, time.monotonic()
    for target in opened.targets:
        every = _facts(opened, target)
        if not pending[target.name]:
            yield from (kept[identity(facts, _IDENTIFYING)] for facts in every)
            continue
        before = done
        try:
            with target.answering() as answer:
                for facts, item in zip(every, opened.items, strict=True):
                    if (known := kept.get(identity(facts, _IDENTIFYING))) is not None:
                        yield known
                        continue
                    rest = duration((time.monotonic() - started) / done * (left - done)) if done else ""
                    time_left = f" · {rest} left" if rest else ""
                    show(f"evaluate · {target.name} · {_label(item)} · {done + 1} of {left}{time_left}")
                    record = _answered(facts, item, answer)
                    if file is not None:
                        file.append(record)
                    done += 1
                    yield record
        except TriforceError as error:  # the other targets may have none
            errors.append(error)
            left -= len(pending[target.name]) - (done - before)


def _facts(opened: OpenEvaluation, target: Target) -> list[dict[str, Any]]:
    """Return for each item what identifies its answer."""
    settings, machine = target.facts, {"name": processor(opened.model.device)}
    return [_identifying(target.name, settings, machine, *each) for each in zip(opened.items, opened.ids, strict=True)]


def _identifying(
    mode: str, settings: dict[str, Any], machine: dict[str, Any], item: Item, ids: Sequence[int]
) -> dict[str, Any]:
    place = {"length": item.length, "depth": item.depth, "seed": item.seed}
    prompt = {"prompt_sha256": digest(ids), "prompt_tokens": len(ids)}
    return {"mode": mode, "task": item.task.name, **place, **prompt, "settings": settings, "machine": machine}


def _answered(facts: dict[str, Any], item: Item, answer: Callable[[Item], str]) -> Record:
    started = time.perf_counter()
    output = answer(item)
    seconds = time.perf_counter() - started
    measured = {"score": item.score(output), "seconds": seconds}
    texts = {"question": item.question, "output": output, "answers": list(item.answers)}
    return {"type": TYPE, **facts, **versioned(), **rounded(measured), **texts}


def _label(item: Item) -> str:
    depth = "" if item.depth is None else f" at {item.depth:.0%}"
    return f"{item.task.name}, {item.length:,} tokens{depth}"
