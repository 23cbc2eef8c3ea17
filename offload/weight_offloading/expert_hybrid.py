"""Experts that lie once in host memory, in the host's layout, and run there for few rows and on the device for many.

Where the device computes with another layout, an expert is unpacked in its buffer once it has arrived: the device's
memory is some forty times as fast as the link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.native.ops import NativeLinear
from ..kernels.ops import LocalLinear, Operations
from ..model.experts import ExpertsAway
from .expert_stream import Arrange


@dataclass(frozen=True, slots=True)
class HybridExperts:
    """The experts of one layer, by the way that passes of so many rows take; see `ExpertsAway`."""

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
