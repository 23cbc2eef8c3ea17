"""Experts that the host runs, in its memory, while the device waits: only rows of tokens travel.

A pass of a few tokens reads as many experts, and host memory gives their bytes faster than the link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..architecture.expert_dims import expected_experts
from ..kernels.ops import LocalLinear
from ..memory.link import LINK_COST
from ..model.experts import ExpertWeights, grouped, weighted_sum
from .expert_statistics import ExpertStatistics

HOST_COST = LINK_COST / 2  # to read a byte there, relative to the device's memory: about twice the link's rate


@dataclass(frozen=True, slots=True)
class HostExperts:
    """The experts of one layer on the host; see `ExpertsAway`.

    `activated` is by the host's operations, and `sizes` are the bytes of each expert.
    """

    gate_up: tuple[LocalLinear, ...]
    down: tuple[LocalLinear, ...]
    per_token: int
    activated: Callable[[Tensor], Tensor]
    statistics: ExpertStatistics
    sizes: tuple[int, ...]

    def weighted_sum(
        self, x: Tensor, weights: Tensor, experts: Tensor, activated: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Run the experts as `ExpertsAway` says, with the host's own activation instead of the device's."""
        rows, shares, groups = x.cpu(), weights.cpu(), grouped(experts.cpu())
        start = time.perf_counter()
        total = weighted_sum(self.gate_up, self.down, rows, shares, groups, self.activated)
        count = self.statistics
        count.seconds += time.perf_counter() - start
        count.passes += 1
        count.experts += len(groups[0])
        count.bytes += sum(self.sizes[number] for number, _ in groups[0])
        return total.to(x.device)

    def read_cost(self, tokens: int) -> float:
        return HOST_COST * expected_experts(len(self.sizes), self.per_token, tokens) * self.sizes[0]


def host_experts(
    experts: ExpertWeights, activated: Callable[[Tensor], Tensor], statistics: ExpertStatistics
) -> HostExperts:
    """Return what runs experts that are loaded on the host."""
    pairs = zip(experts.gate_up, experts.down, strict=True)
    sizes = tuple(sum(tensor.nbytes for linear in pair for tensor in linear.tensors()) for pair in pairs)
    return HostExperts(experts.gate_up, experts.down, experts.per_token, activated, statistics, sizes)
