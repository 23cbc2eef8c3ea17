"""One forward pass for the steps of several sequences: linears see all rows at once, attention is by sequence."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..kernels.delta_rule import DeltaRule
from ..model.decoder import Model
from ..speculation.passes.steps import Step
from .lane import LogitsRequest

_Part = TypeVar("_Part", Step, LogitsRequest)
Result = Tensor | Exception


class JointCache:
    """The caches of several sequences as one that attends: the rows of each sequence follow each other."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.caches = [step.cache for step in steps]
        self._sizes = [len(step.ids) for step in steps]

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, lse: Tensor | None = None) -> Tensor:
        """Attend as each cache does; the arguments as there, for all sequences."""
        return self._attend([cache.attend for cache in self.caches], layer, q, k, v, lse)

    def attend_window(self, layer: int, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None = None) -> Tensor:
        return self._attend([cache.attend_window for cache in self.caches], layer, q, k, v, lse)

    def attend_linear(self, layer: int, rule: DeltaRule, rows: Tensor, gates: Tensor) -> Tensor:
        """Run the tokens as each cache does in a layer with linear attention."""
        parts = zip(self.caches, rows.split(self._sizes), gates.split(self._sizes), strict=True)
        return torch.cat([cache.attend_linear(layer, rule, own, own_gates) for cache, own, own_gates in parts])

    def positions(self) -> Tensor:
        """Return the positions of the pass's tokens, each in its own sequence."""
        return torch.cat([cache.positions() for cache in self.caches])

    def _attend(self, attends: Sequence[Callable[..., Tensor]], layer: int, q: Tensor, *more: Tensor | None) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        nothing = [None] * len(attends)
        parts = zip(*(nothing if x is None else x.split(self._sizes) for x in (q, *more)), strict=True)
        for attend, target, (*rows, lse) in zip(attends, out.split(self._sizes), parts, strict=True):
            target.copy_(attend(layer, *rows) if lse is None else attend(layer, *rows, lse=lse))
        return out


def run_steps(steps: Sequence[Step]) -> list[Result]:
    """Run steps of any models and caches, those of a model in one pass; return the hidden rows of each.

    In place of those stands the exception that a step raises by itself.
    """
    return _by_model(steps, _run_pass)


def run_logits(requests: Sequence[LogitsRequest]) -> list[Result]:
    """Return the logits of each request, those of one model from one product, or the exception that it raises."""
    return _by_model(requests, _run_head)


@torch.inference_mode()
def _run_pass(model: Model, steps: Sequence[Step]) -> Sequence[Result]:
    """Run steps in one pass. An exception leaves every cache as it was."""
    if len(steps) == 1:
        return [steps[0].run()]
    ids = torch.cat([step.ids for step in steps])
    for step in steps:
        step.cache.begin(len(step.ids), step.tree)
    hidden = model.through(ids, JointCache(steps))
    return list(map(_committed, steps, hidden.split([len(step.ids) for step in steps])))


def _committed(step: Step, hidden: Tensor) -> Result:
    """Make a step's tokens part of its cache; return its hidden rows, or what that raises: others are committed."""
    try:
        step.cache.commit() if step.tree is None else step.cache.hold()
    except Exception as error:
        return error
    return hidden


@torch.inference_mode()
def _run_head(model: Model, requests: Sequence[LogitsRequest]) -> Sequence[Tensor]:
    rows = model.logits(torch.cat([request.hidden for request in requests]))
    return rows.split([len(request.hidden) for request in requests])


def _by_model(parts: Sequence[_Part], compute: Callable[[Model, Sequence[_Part]], Sequence[Result]]) -> list[Result]:
    """Compute the parts of each model at once; return the results in the order of the parts."""
    results: dict[int, Result] = {}
    for model in {id(part.model): part.model for part in parts}.values():
        places = [place for place, part in enumerate(parts) if part.model is model]
        results |= zip(places, _isolated(model, [parts[place] for place in places], compute), strict=True)
    return [results[place] for place in range(len(parts))]


def _isolated(
    model: Model, parts: Sequence[_Part], compute: Callable[[Model, Sequence[_Part]], Sequence[Result]]
) -> Sequence[Result]:
    """Return the results of all at once; if that raises an exception, of each by itself, or the one that it raises.

    Of several ranks, all raise it: one that computed again would be out of step with the others. A pass over a window
    whose keys are overwritten cannot be run again.
    """
    try:
        return compute(model, parts)
    except Exception as error:
        if model.group.size > 1:
            raise
        failure = error
    if len(parts) == 1:
        return [failure]
    again = [isinstance(part, LogitsRequest) or part.cache.is_intact for part in parts]
    return [_isolated(model, [part], compute)[0] if ok else failure for part, ok in zip(parts, again, strict=True)]
