"""Accumulators that merge partial attention in the order of the keys; each row may have its own set of keys.

Only the running result is stored, whatever the number of partials. Partials are added one after the other, so the bits
of a row do not depend on the keys of other rows.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from .attention import Partial
from .native import Kernel
from .native.calls import merge_call


class Accumulator(Protocol):
    """Running attention of rows `[tokens, heads, head_dim]`, to which partial results are added."""

    def add(self, rows: slice, part: Any) -> None:
        """Merge the partial result of the tokens `rows` over the next keys, as a page format's `attend` returns it."""
        ...

    def output(self) -> Tensor:
        """Return the attention over all keys added so far, in the shape and dtype of the queries."""
        ...


class TorchAccumulator:
    """Accumulator of `Partial`s that uses torch operations on the device of the queries."""

    def __init__(self, q: Tensor) -> None:
        self._dtype = q.dtype
        self._max_lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
        self._total = torch.zeros_like(self._max_lse)
        self._out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)

    def add(self, rows: slice, part: Partial) -> None:
        max_lse, total, out = self._max_lse[rows], self._total[rows], self._out[rows]
        new_max = torch.maximum(max_lse, part.lse)
        decay, weight = (max_lse - new_max).exp_(), (part.lse - new_max).exp_()
        total.mul_(decay).add_(weight)
        out.mul_(decay.unsqueeze(-1)).addcmul_(part.out.float(), weight.unsqueeze(-1))
        max_lse.copy_(new_max)

    def output(self) -> Tensor:
        return self._out.div_(self._total.unsqueeze(-1)).to(self._dtype)


class KernelAccumulator:
    """Accumulator of the native kernel's partial results; merges them as the kernel merges its pieces of 512 keys.

    A sequence that is cut at multiples of 512 keys therefore gives the same bits here as in one store.
    """

    def __init__(self, kernel: Kernel, q: Tensor) -> None:
        self._kernel, self._like = kernel, q
        tokens, heads, head_dim = q.shape
        self._state = torch.zeros((tokens, heads, 2 + head_dim))  # maximum, sum, output
        self._state[..., 0] = float("-inf")

    def add(self, rows: slice, part: Tensor) -> None:
        """Merge `part`, `[pieces, tokens, heads, 2 + head_dim]`."""
        self._kernel.merge(merge_call(self._state[rows], part))

    def output(self) -> Tensor:
        out = torch.empty_like(self._like)
        self._kernel.merge(merge_call(self._state, out=out))
        return out
