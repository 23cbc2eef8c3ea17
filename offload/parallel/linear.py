"""Linears of which each rank has a part; the decoder does not know. See `Linear` in operations.py."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..kernels.ops import Linear
from .group import Group


class SummedLinear:
    """A rank has some columns of W and that part of x: the ranks' products are added up, and `onto` once."""

    def __init__(self, linear: Linear, group: Group) -> None:
        self._linear, self._group = linear, group

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        # In fp32 where that is cheap: the sum is then as good as that of one rank. A GPU's link has better to do.
        part = self._linear.wide(x) if x.device.type == "cpu" else self._linear(x)
        whole = self._group.sum(part)
        return whole.to(x.dtype) if onto is None else onto.add_(whole)

    def wide(self, x: Tensor) -> Tensor:
        return self._group.sum(self._linear.wide(x))

    def rows(self, ids: Tensor) -> Tensor:
        raise AssertionError("no table is divided by its columns")

    def tensors(self) -> list[Tensor]:
        return self._linear.tensors()

    def over(self, tensors: list[Tensor]) -> SummedLinear:
        return SummedLinear(self._linear.over(tensors), self._group)


class GatheredLinear:
    """A rank has some rows of W: output head, embedding, or both."""

    def __init__(self, linear: Linear, group: Group, parts: Sequence[range]) -> None:
        self._linear, self._group, self._parts = linear, group, parts

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        raise AssertionError("an output head gives fp32, and is added to nothing")

    def wide(self, x: Tensor) -> Tensor:
        return self._group.gather(self._linear.wide(x), [len(part) for part in self._parts])

    def rows(self, ids: Tensor) -> Tensor:
        """A token's row is on one rank; the others add zeros."""
        part = self._parts[self._group.rank]
        outside = (ids < part.start) | (ids >= part.stop)
        rows = self._linear.rows((ids - part.start).masked_fill(outside, 0))
        return self._group.sum(rows.masked_fill(outside.unsqueeze(1), 0))

    def tensors(self) -> list[Tensor]:
        return self._linear.tensors()

    def over(self, tensors: list[Tensor]) -> GatheredLinear:
        return GatheredLinear(self._linear.over(tensors), self._group, self._parts)


class Table:
    """An embedding of its own, as the rows of a linear."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def rows(self, ids: Tensor) -> Tensor:
        return self._weight[ids]
