"""The mixture of experts of a layer: its weights, the choice of experts for each token, and what they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..architecture.layer_spec import LayerSpec, expected_experts
from ..kernels.ops import LocalLinear
from ..parallel import Group

Linears = Sequence[LocalLinear]  # by the expert's number
Groups = tuple[list[tuple[int, int]], Tensor]  # as `grouped` returns them
_WIDE = 32  # numbers: torch computes fewer one by one, and rounds a sigmoid otherwise


class ExpertsAway(Protocol):
    """Runs the experts of a layer that are in host memory, while its router is on the device."""

    def weighted_sum(
        self, x: Tensor, weights: Tensor, experts: Tensor, activated: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return what the function `weighted_sum` does, on the device; weights and experts as `route` returns them."""

    def read_cost(self, tokens: int) -> float:
        """Return the bytes that `tokens` tokens are expected to read; other memory than the device's counts more."""


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that all tokens have; with a gate, it is multiplied with the gate's sigmoid."""

    gate: LocalLinear | None  # [1, hidden]
    gate_up: LocalLinear  # [2 * width, hidden]
    down: LocalLinear  # [hidden, width]

    def output(self, x: Tensor, activated: Callable[[Tensor], Tensor]) -> Tensor:
        """Return its output for rows `x` `[tokens, hidden]`, in fp32."""
        out = self.down.wide(activated(self.gate_up(x)))
        return out if self.gate is None else out.mul_(_sigmoid(self.gate.wide(x).expand(-1, _WIDE))[:, :1])

    @property
    def linears(self) -> tuple[LocalLinear, ...]:
        return tuple(linear for linear in (self.gate_up, self.down, self.gate) if linear is not None)


def _sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of rows of whole vectors of `_WIDE` numbers, whose bits depend on no other row."""
    return x.contiguous().sigmoid()


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The router and the experts of one layer. `group` are the ranks that share the width of every expert.

    With `away` the experts are in host memory, and `gate_up` and `down` are empty; the `shared` one is on the device.
    """

    router: LocalLinear  # [experts, hidden]
    gate_up: tuple[LocalLinear, ...]  # of each expert [2 * width, hidden]
    down: tuple[LocalLinear, ...]  # of each expert [hidden, width]
    per_token: int  # experts that a token is routed to
    group: Group
    shared: SharedExpert | None = None
    away: ExpertsAway | None = None
    choice_bias: Tensor | None = None  # [experts] in fp32, of a sigmoid router

    def mixed(self, x: Tensor, spec: LayerSpec, activated: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the weighted sum of the experts' outputs for rows `x` `[tokens, hidden]`, in fp32.

        Each expert runs once, on the rows that are routed to it. A token's sum is made in the order of its experts'
        numbers, so that its bits do not depend on the other rows where those of the linears do not.

        Args:
            spec: the layer's; it says how the router weighs.
            activated: maps the results of `gate_up` to what `down` takes.
        """
        weights, experts = route(self.router.wide(x), self.per_token, spec, self.choice_bias)
        if self.away is not None:
            total = self.away.weighted_sum(x, weights, experts, activated)
        else:
            total = weighted_sum(self.gate_up, self.down, x, weights, grouped(experts), activated)
        if self.shared is not None:
            total += self.shared.output(x, activated)
        return self.group.sum(total)

    def read_bytes(self, tokens: int) -> float:
        """Return the bytes of the router and of the experts that `tokens` tokens are expected to read."""
        always = (self.router, *(self.shared.linears if self.shared else ()))
        fixed = sum(tensor.nbytes for linear in always for tensor in linear.tensors())
        if self.away is not None:
            return fixed + self.away.read_cost(tokens)
        read = expected_experts(len(self.down), self.per_token, tokens) / len(self.down)
        return fixed + read * (sum(tensor.nbytes for tensor in self.tensors()) - fixed)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of all linears, as `Linear.tensors` does."""
        shared = self.shared.linears if self.shared else ()
        return [tensor for linear in (self.router, *self.gate_up, *self.down, *shared) for tensor in linear.tensors()]

    def over(self, tensors: list[Tensor]) -> ExpertWeights:
        """Return the experts over other memory, as `Linear.over` does."""
        given = iter(tensors)

        def moved(linear: LocalLinear) -> LocalLinear:
            return linear.over([next(given) for _ in linear.tensors()])

        router = moved(self.router)
        gate_up, down = (tuple(map(moved, linears)) for linears in (self.gate_up, self.down))
        shared = self.shared
        if shared is not None:
            both, gate = (moved(shared.gate_up), moved(shared.down)), shared.gate and moved(shared.gate)
            shared = SharedExpert(gate, *both)
        return replace(self, router=router, gate_up=gate_up, down=down, shared=shared)


def weighted_sum(
    gate_up: Linears, down: Linears, x: Tensor, weights: Tensor, groups: Groups, activated: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the weighted sum of the experts' outputs for rows `x`, as `ExpertWeights.mixed` does.

    Args:
        weights: of each token's experts, `[tokens, per_token]`.
        groups: what `grouped` returns for the numbers of these experts.
    """
    runs, places = groups
    inner = activated(_by_expert(gate_up, runs, x[places // weights.shape[1]]))
    outs = _by_expert(down, runs, inner, torch.float32).mul_(weights.flatten()[places].unsqueeze(1))
    first, *others = places.argsort().view(weights.shape).unbind(1)
    total = outs[first]
    for other in others:
        total += outs[other]
    return total


def grouped(experts: Tensor) -> Groups:
    """Return number and rows of each expert that any token has, and where those rows are among `experts.flatten()`."""
    if len(experts) == 1:
        return [(number, 1) for number in experts[0].tolist()], torch.arange(experts.shape[1], device=experts.device)
    chosen, places = experts.flatten().sort(stable=True)
    numbers, counts = chosen.unique_consecutive(return_counts=True)
    return list(zip(numbers.tolist(), counts.tolist(), strict=True)), places


def _by_expert(
    linears: Linears, runs: Sequence[tuple[int, int]], x: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the products of rows `x`, of which each expert has as many as `runs` says: pairs of number and count."""
    outputs = linears[runs[0][0]].outputs
    y, end = torch.empty((len(x), outputs), dtype=dtype or x.dtype, device=x.device), 0
    for expert, count in runs:
        some = slice(end, end := end + count)
        linears[expert].into(x[some], y[some])
    return y


def route(logits: Tensor, per_token: int, spec: LayerSpec, choice_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the weights and the numbers of each token's experts, in ascending order, both `[tokens, per_token]`.

    Args:
        logits: the router's, `[tokens, experts]`, in fp32.
        choice_bias: `[experts]`, of a sigmoid router: it is added where experts are chosen, and not to their weights.
    """
    if choice_bias is not None:
        scores = _sigmoid(F.pad(logits, (0, -logits.shape[1] % _WIDE)))[:, : logits.shape[1]]
        experts = _in_groups(scores + choice_bias, *spec.router_groups).topk(per_token, dim=-1).indices
        weights = scores.gather(-1, experts)
    else:
        weights, experts = logits.softmax(dim=-1).topk(per_token, dim=-1)
    if spec.router != "all":  # a softmax over them alone
        weights = weights / weights.sum(dim=-1, keepdim=True)
    experts, order = experts.sort(dim=-1)
    return weights.gather(-1, order) * spec.router_scale, experts


def _in_groups(scores: Tensor, groups: int, used: int) -> Tensor:
    """Return scores with -inf outside of each token's best groups, by the sum of their two best experts."""
    if used == groups:
        return scores
    grouped = scores.unflatten(1, (groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(used, dim=-1).indices
    is_used = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, True)
    return grouped.masked_fill(~is_used.unsqueeze(-1), float("-inf")).flatten(1)
