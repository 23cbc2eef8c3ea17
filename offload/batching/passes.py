"""One forward pass for the steps of several sequences: linears see all rows at once, attention is by sequence."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ..kernels.delta_rule import DeltaRule
from ..model.decoder import Model
from ..speculation.passes.steps import Step
from .lane import LogitsRequest

_Wanted = TypeVar("_Wanted", Step, LogitsRequest)
Result = Tensor | Exception


class JointCache:
    """The caches of several sequences as one that attends: the rows of each sequence follow each other."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.caches = [step.cache for step in steps]
        self._sizes = [len(step.ids) for step in steps]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None = None) -> Tensor:
        """Attend as each cache does; the arguments as there, for all sequences."""
        return self._attend([cache.attend for cache in self.caches], layer, q, k, v, lse)

    def attend_window(self, layer: int, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None = None) -> Tensor:
        return self._attend([cache.attend_window for cache in self.caches], layer, q, k, v, lse)

    def attend_linear(self, layer: int, rule: DeltaRule, rows: Tensor, gates: Tensor) -> Tensor:
        """Run the tokens as each cache does in a layer with linear attention."""
        parts = zip(self.caches, rows.split(self._sizes), gates.split(self._sizes), strict=True)
        return torch.cat([cache.attend_linear(layer, rule, *part) for cache, *part in parts])

    def positions(self) -> Tensor:
        """Return the positions of the pass's tokens, each in its own sequence."""
        return torch.cat([cache.positions() for cache in self.caches])

    def _attend(
        self, caches: Sequence[Callable[..., Tensor]], layer: int, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        nothing = [None] * len(caches)
        split = [nothing if x is None else x.split(self._sizes) for x in (q, k, v, out, lse)]
        for attend, *rows, target, each in zip(caches, *split, strict=True):
            target.copy_(attend(layer, *rows, **({} if each is None else {"lse": each})))
        return out


class JointPasses:
    """Runs steps of several sequences, those of one model in one pass."""

    def run(self, steps: Sequence[Step]) -> list[Result]:
        """Run steps of any models and caches; return the hidden rows of each, or the exception that it raises."""
        return _by_model(steps, self._run_pass)

    @torch.inference_mode()
    def _run_pass(self, model: Model, steps: Sequence[Step]) -> Sequence[Result]:
        """Run steps in one pass. An exception leaves every cache as it was."""
        if len(steps) == 1:
            return [steps[0].run()]
        ids = torch.cat([step.ids for step in steps])
        for step in steps:
            step.cache.begin(len(step.ids), step.tree)
        hidden = model.through(ids, JointCache(steps))
        return list(map(_committed, steps, hidden.split([len(step.ids) for step in steps])))


def logits(heads: Sequence[LogitsRequest]) -> list[Result]:
    """Return the logits of each request, those of one model from one product, or the exception that it raises."""
    return _by_model(heads, _run_head)


def _committed(step: Step, hidden: Tensor) -> Result:
    """Make a step's tokens part of its cache; return its hidden rows, or what that raises: others are committed."""
    try:
        step.cache.commit() if step.tree is None else step.cache.hold()
    except Exception as error:
        return error
    return hidden


def _by_model(wanted: Sequence[_Wanted], compute: Callable[[Model, list[_Wanted]], Sequence[Result]]) -> list[Result]:
    """Compute what each model is wanted for at once; return the results in the order of what was wanted."""
    found: dict[int, Result] = {}
    for model in {id(each.model): each.model for each in wanted}.values():
        places = [place for place, each in enumerate(wanted) if each.model is model]
        found |= zip(places, _isolated(partial(compute, model), [wanted[place] for place in places]), strict=True)
    return [found[place] for place in range(len(wanted))]


def _isolated(compute: Callable[[list[_Wanted]], Sequence[Result]], wanted: list[_Wanted]) -> Sequence[Result]:
    """Return the results of all at once; if that raises an exception, of each by itself, or the one that it raises.

    Of several ranks, all raise it: one that computed again would be out of step with the others.
    """
    try:
        return compute(wanted)
    except Exception as error:
        if wanted[0].model.group.size > 1:
            raise
        failure = error
    if len(wanted) == 1:
        return [failure]
    return [_isolated(compute, [each])[0] if _is_repeatable(each) else failure for each in wanted]


def _is_repeatable(part: Step | LogitsRequest) -> bool:
    """Return whether what an exception has interrupted can be computed again: not over a window that is overwritten."""
    return isinstance(part, LogitsRequest) or part.cache.is_intact


@torch.inference_mode()
def _run_head(model: Model, heads: Sequence[LogitsRequest]) -> Sequence[Tensor]:
    rows = model.logits(torch.cat([head.hidden for head in heads]))
    return rows.split([len(head.hidden) for head in heads])
