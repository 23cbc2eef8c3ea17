"""An evaluation whose models are opened: all checks that need no weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from offload.api.opened_model import OpenModel
from offload.errors import PromptError
from offload.evaluation.tasks.task import Item

from ..bench.cells import Weights, weights_of
from ..bench.compared import EXACT
from ..bench.mode_engine import ModeEngines
from ..bench.quality_modes import OpenMode, fitted, open_modes, with_tiers
from ..output.progress import ProgressDisplay
from ..output.terminal import Terminal
from ..run.model_request import open_request
from ..run.openai_client import is_endpoint
from ..run.processor import processor
from .request import CHATTY, MAP_REDUCE, EvaluateRequest, ids_of, is_map_reduce, make_items, part_of
from .targets import Endpoint, MapReduceTarget, ModeTarget, Target


@dataclass(frozen=True, slots=True)
class OpenEvaluation:
    """What answers, and what is asked: the items, and the tokens of their prompts."""

    model: OpenModel
    targets: list[Target]
    items: list[Item]
    ids: list[list[int]]
    engines: ModeEngines

    @property
    def machine(self) -> str:
        """Return the processor's name."""
        return processor(self.model.device)


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
    items = make_items(asked, exact.model.tokenizer)
    ids = [ids_of(exact.model.tokenizer, item, asked.is_chat) for item in items]
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
            raise PromptError(error.message, f"shorter ones by --context, or --modes {MAP_REDUCE}") from None
        left_out[EXACT] = error.message
        return {}
