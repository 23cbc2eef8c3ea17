"""What layers take beside the hidden rows: what follows from each row's token and position. Most models need none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.ops import Linear
from ..parallel.linear import Table


@dataclass(frozen=True, slots=True)
class RowInputs:
    """Inputs of layers for the rows of a pass.

    Attributes:
        query_scales: factors of the queries, `[tokens, 1, 1]`; None for 1.
        embeddings: each layer's own, `[tokens, layers, width]`, of one layer `[tokens, width]`; None if there are none.
    """

    query_scales: Tensor | None = None
    embeddings: Tensor | None = None

    def split(self, size: int, tokens: int) -> Iterator[RowInputs]:
        """Yield the inputs of each `size` rows of a pass of `tokens` tokens, which have no embeddings."""
        for start in range(0, tokens, size):
            yield NO_INPUTS if self.query_scales is None else RowInputs(self.query_scales[start : start + size])

    def layer(self, index: int) -> RowInputs:
        return self if self.embeddings is None else RowInputs(self.query_scales, self.embeddings[:, index])


NO_INPUTS = RowInputs()


def query_scales(beta: float, tokens: float, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors of queries at `positions` `[tokens]`, as `ModelShape.query_scaling` says: `[tokens, 1, 1]`."""
    return (1 + beta * torch.log(1 + torch.floor(positions / tokens))).to(dtype).view(-1, 1, 1)


@dataclass(frozen=True, slots=True)
class LayerEmbeddings:
    """What each layer of Gemma 4 takes of a token: an embedding of its own, and a part of the common one.

    Attributes:
        table: tokens' embeddings of all layers, `[vocab, layers * width]`, in host memory: a pass reads few rows.
        projection: `[layers * width, hidden]`.
        norm: of the projection's parts, `[width]` in fp32.
    """

    table: Table | Linear
    projection: Linear
    norm: Tensor

    def rows(self, ids: Tensor, x: Tensor, epsilon: float) -> Tensor:
        """Return the embeddings `[tokens, layers, width]` of `ids`, whose common ones are `x` `[tokens, hidden]`."""
        width = len(self.norm)
        scale = torch.tensor(width**0.5, dtype=x.dtype).item()
        own = self.table.rows(ids.cpu()).to(x.device, x.dtype).view(len(ids), -1, width) * scale
        projected = (self.projection(x) * x.shape[1] ** -0.5).view(own.shape)
        normed = torch.nn.functional.rms_norm(projected.float(), self.norm.shape, self.norm, epsilon).to(x.dtype)
        return (normed + own) * 2.0**-0.5
