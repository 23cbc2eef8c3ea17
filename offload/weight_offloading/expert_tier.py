"""Experts of a mixture in host memory: where they are loaded to, and what runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.ops import Operations
from ..memory.link import Link
from ..model.experts import ExpertWeights
from .expert_statistics import ExpertStatistics
from .expert_stream import ExpertStream
from .host_experts import host_experts

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ExpertTier:
    """The first `kept` sparse layers have their experts on the device, the others in host memory.

    Args:
        way: "host": `operations` run them there; "stream": the chosen ones are copied over `link`.
        operations: those of the host.
    """

    kept: int
    way: str
    link: Link
    operations: Operations


class ExpertMover:
    """Moves the experts of one layer after the other to host memory; then `finish` must be called."""

    def __init__(self, tier: ExpertTier, device: torch.device) -> None:
        self._tier = tier
        self.statistics = ExpertStatistics(tier.way)
        self._stream = ExpertStream(tier.link, device, self.statistics) if tier.way == "stream" else None
        self._seen = 0

    def takes_next(self) -> bool:
        """Return whether the experts of the next sparse layer are to be moved; call it once for each."""
        self._seen += 1
        return self._seen > self._tier.kept

    def operations(self, device: Operations) -> Operations:
        """Return the operations with which experts are loaded, on the CPU, in a model of those of the `device`."""
        return device if self._tier.way == "stream" else self._tier.operations

    def moved(self, experts: ExpertWeights, activation: Callable[[Operations], Activation]) -> ExpertWeights:
        """Return a layer's experts, loaded on the CPU but for their router, as they run from host memory.

        Args:
            activation: returns what is `activated` in `mixed`, by the operations that it takes.
        """
        self.statistics.layers += 1
        if self._stream is not None:
            away = self._stream.add(experts)
        else:
            away = host_experts(experts, activation(self._tier.operations), self.statistics)
        return replace(experts, gate_up=(), down=(), away=away)

    def finish(self) -> None:
        """Allocate what all layers share on the device."""
        if self._stream is not None:
            self._stream.allocate()
