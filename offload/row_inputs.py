"""What layers take beside the hidden rows: numbers that follow from each row's position. Most models need none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowInputs:
    """Inputs of all layers for the rows of a pass.

    Attributes:
        query_scales: factors of the queries, `[tokens, 1, 1]`; None for 1.
    """

    query_scales: Tensor | None = None

    def split(self, size: int, tokens: int) -> Iterator[RowInputs]:
        """Yield the inputs of each `size` rows of a pass of `tokens` tokens."""
        for start in range(0, tokens, size):
            some = slice(start, start + size)
            yield RowInputs(None if self.query_scales is None else self.query_scales[some])


NO_INPUTS = RowInputs()


def query_scales(beta: float, tokens: float, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors of queries at `positions` `[tokens]`, as `ModelShape.query_scaling` says: `[tokens, 1, 1]`."""
    return (1 + beta * torch.log(1 + torch.floor(positions / tokens))).to(dtype).view(-1, 1, 1)
