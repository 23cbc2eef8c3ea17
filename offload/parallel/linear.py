"""Linears that are sharded over the ranks, behind the interface of `Linear` in kernels/ops.py."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..kernels.ops import Linear
from .group import Group


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
