"""Experts of a mixture in host memory: where they are loaded to, what runs them, and those that the host runs.

Run by the host (`HostExperts`), they stay in its memory, and only rows of tokens travel; the device waits. A pass of a
few tokens reads as many experts, and host memory gives their bytes faster than the link.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..architecture.layer_spec import expected_experts
from ..kernels.native.ops import NativeLinear
from ..kernels.ops import LocalLinear, Operations
from ..memory.link import LINK_COST, Link
from ..model.experts import ExpertsAway, ExpertWeights, grouped, weighted_sum
from ..settings.placement_settings import HYBRID_ROWS
from .expert_stream import Arrange, ExpertStatistics, ExpertStream

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


Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class HybridExperts:
    """The experts of one layer, by the way that passes of so many rows take; see `ExpertsAway`.

    They lie once in host memory, in the host's layout. Where the device computes with another one, an expert is
    unpacked in its buffer once it has arrived: the device's memory is some forty times as fast as the link.
    """

    streamed: ExpertsAway
    hosted: ExpertsAway
    rows: int  # of the least pass that is streamed

    def weighted_sum(
        self, x: Tensor, weights: Tensor, experts: Tensor, activated: Callable[[Tensor], Tensor]
    ) -> Tensor:
        return self._way(len(x)).weighted_sum(x, weights, experts, activated)

    def read_cost(self, tokens: int) -> float:
        return self._way(tokens).read_cost(tokens)

    def _way(self, tokens: int) -> ExpertsAway:
        return self.streamed if tokens >= self.rows else self.hosted


def arranging(host: Operations, device: Operations) -> Arrange | None:
    """Return what makes an expert of the host's operations one of the device's; None if both have one layout."""
    if host.kernel is None or device.kernel is not None:
        return None
    return lambda expert: (_arranged(expert[0], device), _arranged(expert[1], device))


def _arranged(linear: LocalLinear, device: Operations) -> LocalLinear:
    assert isinstance(linear, NativeLinear), "the host's operations are the kernel's"
    weights, bias = linear.unpacked()
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(plain) < len(weights):  # the model computes in bf16
        return device.quantized_linear(weights, None if bias is None else bias.bfloat16())
    whole = plain[0] if len(plain) == 1 else torch.cat(plain)
    return device.linear(whole, None if bias is None else bias.to(whole.dtype))


@dataclass(frozen=True)
class ExpertTier:
    """The first `kept` sparse layers have their experts on the device, the others in host memory.

    Args:
        way: "host": `operations` run them there; "stream": the chosen ones are copied over `link`; "hybrid": passes of
            `rows` rows or more copy them, and others run them there.
        operations: those of the host.
    """

    kept: int
    way: str
    link: Link
    operations: Operations
    rows: int = HYBRID_ROWS


class ExpertMover:
    """Moves the experts of one layer after the other to host memory; then `finish` must be called."""

    def __init__(self, tier: ExpertTier, device: torch.device, operations: Operations) -> None:
        """Create a mover to a model on `device`, which computes by the `operations`."""
        self._tier = tier
        self.statistics, self._stream = ExpertStatistics(tier.way), None
        if tier.way != "host":
            arrange = arranging(tier.operations, operations) if tier.way == "hybrid" else None
            self._stream = ExpertStream(tier.link, device, self.statistics, arrange)
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
        away: ExpertsAway | None = None
        if self._stream is not None:
            away = streamed = self._stream.add(experts)
            if self._tier.way == "hybrid":  # the stream's copy of them is the only one
                gate_up, down = zip(*self._stream.in_memory(streamed.layer), strict=True)
                hosted = self._hosted(replace(experts, gate_up=gate_up, down=down), activation)
                away = HybridExperts(streamed, hosted, self._tier.rows)
        return replace(experts, gate_up=(), down=(), away=away or self._hosted(experts, activation))

    def _hosted(self, experts: ExpertWeights, activation: Callable[[Operations], Activation]) -> HostExperts:
        return host_experts(experts, activation(self._tier.operations), self.statistics)

    def finish(self) -> None:
        """Allocate what all layers share on the device."""
        if self._stream is not None:
            self._stream.allocate()
