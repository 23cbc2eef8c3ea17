"""Merge a layer's partial results as they come, in the order of their keys, for rows that have not all seen the same.

Only the running result is kept, however many pieces there are. One part is added after the other: what other rows have
seen does not change the last bit of a row's sum.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from .attention import Partial
from .native import Kernel
from .native.calls import merge_call


class Accumulator(Protocol):
    """Attention of rows `[tokens, heads, head_dim]` over keys that come part by part."""

    def add(self, rows: slice, part: Any) -> None:
        """Merge what these tokens give over the next keys: what the same form's `attend` returned."""
        ...

    def output(self) -> Tensor:
        """Return the attention over all that was added, in the shape and type of the queries."""
        ...


class TorchAccumulator:
    """Adds Partials, by torch's operations on the device of the queries."""

    def __init__(self, q: Tensor) -> None:
        self._dtype = q.dtype
        self._top = torch.full(q.shape[:2], float("-inf"), device=q.device)  # the largest log-sum-exp so far
        self._total = torch.zeros_like(self._top)
        self._out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)

    def add(self, rows: slice, part: Partial) -> None:
        top, total, out = self._top[rows], self._total[rows], self._out[rows]
        highest = torch.maximum(top, part.lse)
        kept, weight = (top - highest).exp_(), (part.lse - highest).exp_()
        total.mul_(kept).add_(weight)
        out.mul_(kept.unsqueeze(-1)).addcmul_(part.out.float(), weight.unsqueeze(-1))
        top.copy_(highest)

    def output(self) -> Tensor:
        return self._out.div_(self._total.unsqueeze(-1)).to(self._dtype)


class KernelAccumulator:
    """Adds the native kernel's unfinished results, exactly as the kernel does among its own pieces of 512 keys.

    So a sequence in whole pieces of that length has the same bits here as in one store.
    """

    def __init__(self, kernel: Kernel, q: Tensor) -> None:
        self._kernel, self._like = kernel, q
        tokens, heads, head_dim = q.shape
        self._state = torch.zeros((tokens, heads, 2 + head_dim))  # maximum, sum, output
        self._state[..., 0] = float("-inf")

    def add(self, rows: slice, part: Tensor) -> None:
        """`part`: `[pieces, tokens, heads, 2 + head_dim]`."""
        self._kernel.merge(merge_call(self._state[rows], part))

    def output(self) -> Tensor:
        out = torch.empty_like(self._like)
        self._kernel.merge(merge_call(self._state, out=out))
        return out
