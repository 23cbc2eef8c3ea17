"""Accumulators that merge partial attention in the order of the keys; each row may have its own set of keys.

Only the running result is stored, whatever the number of partials. Partials are added one after the other, so the bits
of a row do not depend on the keys of other rows.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from .attention import Partial
from .native import Kernel
from .native.calls import merge_call

_LN2 = math.log(2)
Newest = Literal["first", "meanwhile", "last"]
Attend = Callable[[Tensor, Tensor, int, bool], Any]  # page, queries, seen, causal -> a partial result


def _only_adds(*_: object) -> Any:
    raise NotImplementedError("this accumulator has no pages")


class PassResult(Protocol):
    """What a pass over tiers adds to.

    `newest` says when it adds its newest keys: "first", because they begin the result; "meanwhile", while the host
    attends to others; or "last", because keys must be added in their order: the bits depend on it.
    """

    newest: Newest

    def add(self, rows: slice, part: Any) -> None:
        """Add the partial result of the tokens `rows` over the next keys, as a page format's `attend` returns it."""

    def add_state(self, state: Tensor) -> None:
        """Add another accumulator's `state` of all rows, over other keys."""


class Accumulator(PassResult, Protocol):
    """Running attention of rows `[tokens, heads, head_dim]`, to which partial results are added."""

    def attend(self, page: Tensor, rows: slice, seen: int, causal: bool = False) -> None:
        """Add the attention of the tokens `rows` over a page, as a page format's `attend` computes it."""

    def state(self) -> Tensor:
        """Return what was added so far, `[tokens, heads, 2 + head_dim]` in fp32: maximum m, sum of exp(logit - m), and
        that sum over the values."""

    def output(self, lse: Tensor | None = None) -> Tensor:
        """Return the attention over all keys added so far, in the shape and dtype of the queries.

        `lse` `[tokens, heads]` in fp32, if given, is filled with the log-sum-exp.
        """


class TorchAccumulator:
    """Accumulator of `Partial`s that uses torch operations on the device of the queries."""

    newest: Newest = "last"

    def __init__(self, q: Tensor, attend: Attend = _only_adds) -> None:
        """Without `attend`, partial results are only added."""
        self._q, self._attend = q, attend
        self._dtype = q.dtype
        self._max_lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
        self._total = torch.zeros_like(self._max_lse)
        self._out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)

    def attend(self, page: Tensor, rows: slice, seen: int, causal: bool = False) -> None:
        self.add(rows, self._attend(page, self._q[rows], seen, causal))

    def add(self, rows: slice, part: Partial) -> None:
        max_lse, total, out = self._max_lse[rows], self._total[rows], self._out[rows]
        new_max = torch.maximum(max_lse, part.lse)
        decay, weight = (max_lse - new_max).exp_(), (part.lse - new_max).exp_()
        total.mul_(decay).add_(weight)
        out.mul_(decay.unsqueeze(-1)).addcmul_(part.out.float(), weight.unsqueeze(-1))
        max_lse.copy_(new_max)

    def add_state(self, state: Tensor) -> None:
        state = state.to(self._out.device, non_blocking=True)
        other_max, other_total, other_out = state[..., 0], state[..., 1], state[..., 2:]
        self.add(slice(None), Partial(other_out / other_total.unsqueeze(-1), other_max + other_total.log()))

    def state(self) -> Tensor:
        return torch.cat((self._max_lse.unsqueeze(-1), self._total.unsqueeze(-1), self._out), dim=-1)

    def output(self, lse: Tensor | None = None) -> Tensor:
        if lse is not None:  # in fp64 as in `attention.with_sinks`, for the same reason
            lse.copy_(self._max_lse.double() + self._total.double().log())
        return self._out.div_(self._total.unsqueeze(-1)).to(self._dtype)


class KernelAccumulator:
    """Accumulator of the native kernel's partial results; merges them as the kernel merges its pieces of 512 keys.

    A sequence that is cut at multiples of 512 keys therefore gives the same bits here as in one store.
    """

    newest: Newest = "last"

    def __init__(self, kernel: Kernel, q: Tensor, attend: Attend = _only_adds) -> None:
        """Without `attend`, partial results are only added."""
        self._kernel, self._like, self._attend = kernel, q, attend
        tokens, heads, head_dim = q.shape
        self._state = torch.zeros((tokens, heads, 2 + head_dim))  # maximum, sum, output
        self._state[..., 0] = float("-inf")

    def attend(self, page: Tensor, rows: slice, seen: int, causal: bool = False) -> None:
        self.add(rows, self._attend(page, self._like[rows], seen, causal))

    def add(self, rows: slice, part: Tensor) -> None:
        """Merge `part`, `[pieces, tokens, heads, 2 + head_dim]`."""
        self._kernel.merge(merge_call(self._state[rows], part))

    def add_state(self, state: Tensor) -> None:
        state = state.clone()
        state[..., 0] /= _LN2
        self.add(slice(None), state.unsqueeze(0))

    def state(self) -> Tensor:
        state = self._state.clone()
        state[..., 0] *= _LN2  # the kernel's maximum is that of logits in powers of two
        return state

    def output(self, lse: Tensor | None = None) -> Tensor:
        out = torch.empty_like(self._like)
        self._kernel.merge(merge_call(self._state, out=out, lse=lse))
        return out
