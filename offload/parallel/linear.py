"""Linears that are sharded over the ranks, behind `Linear` of kernels/ops.py, and norms over the heads of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.ops import Linear
from .shard import Group


class SummedLinear:
    """A linear sharded by columns: each rank has some columns of W and that part of x. Products are all-reduced."""

    def __init__(self, linear: Linear, group: Group) -> None:
        self._linear, self._group = linear, group

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        # In fp32 on a CPU: the sum is then as exact as one rank's. On a GPU the link is the bottleneck.
        part = self._linear.wide(x) if x.device.type == "cpu" else self._linear(x)
        whole = self._group.sum(part)
        return whole.to(x.dtype) if onto is None else onto.add_(whole)

    def wide(self, x: Tensor) -> Tensor:
        return self._group.sum(self._linear.wide(x))

    def rows(self, ids: Tensor) -> Tensor:
        raise AssertionError("no embedding is sharded by columns")

    def tensors(self) -> list[Tensor]:
        return self._linear.tensors()

    def over(self, tensors: list[Tensor]) -> SummedLinear:
        return SummedLinear(self._linear.over(tensors), self._group)


class GatheredLinear:
    """A linear sharded by rows: the output head, the embedding, or both."""

    def __init__(self, linear: Linear, group: Group, parts: Sequence[range]) -> None:
        self._linear, self._group, self._parts = linear, group, parts

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        raise AssertionError("the output head returns fp32: call wide()")

    def wide(self, x: Tensor) -> Tensor:
        return self._group.gather(self._linear.wide(x), [len(part) for part in self._parts])

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of tokens: each is on one rank, and the others add zeros."""
        part = self._parts[self._group.rank]
        outside = (ids < part.start) | (ids >= part.stop)
        rows = self._linear.rows((ids - part.start).masked_fill(outside, 0))
        return self._group.sum(rows.masked_fill(outside.unsqueeze(1), 0))

    def tensors(self) -> list[Tensor]:
        return self._linear.tensors()

    def over(self, tensors: list[Tensor]) -> GatheredLinear:
        return GatheredLinear(self._linear.over(tensors), self._group, self._parts)


class Table:
    """An embedding that is not tied to the output head."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def rows(self, ids: Tensor) -> Tensor:
        return self._weight[ids]


class JoinedNorm:
    """RMSNorms of all heads of q, and of all of k, of which each rank has some: their sums of squares are all-reduced.

    Sums are in fp32 and have the same bits on every rank.
    """

    def __init__(
        self, weights: tuple[Tensor, Tensor], widths: tuple[int, int], counts_keys: bool, group: Group
    ) -> None:
        """Make the norms from this rank's `weights` of q and k, `[heads * head_dim]` each.

        Args:
            widths: how many numbers all heads of q, and all of k, have.
            counts_keys: whether this rank's k counts; of several ranks that have the same KV head, one rank's does.
        """
        self._weights, self._widths, self._counts_keys, self._group = weights, widths, counts_keys, group

    def __call__(self, q: Tensor, k: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Return q `[tokens, heads, head_dim]` and k `[tokens, kv_heads, head_dim]` normalised."""
        wide = [x.reshape(len(x), -1).float() for x in (q, k)]
        sums = torch.stack([x.square().sum(-1) for x in wide], 1)
        if not self._counts_keys:
            sums[:, 1] = 0
        means = self._group.sum(sums) / torch.tensor(self._widths, device=sums.device)
        scales = torch.rsqrt(means + epsilon).split(1, dim=1)
        both = zip(wide, scales, self._weights, (q, k), strict=True)
        q, k = ((x * scale * weight).to(like.dtype).view(like.shape) for x, scale, weight, like in both)
        return q, k

    def tensors(self) -> list[Tensor]:
        return list(self._weights)

    def over(self, tensors: list[Tensor]) -> JoinedNorm:
        """Return the same norms with other weights."""
        return JoinedNorm((tensors[0], tensors[1]), self._widths, self._counts_keys, self._group)
