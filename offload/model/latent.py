"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), in its absorbed form.

All heads attend to one vector a token, which is cached: its latent, from which keys and values follow by linears, and a
part with RoPE. The linear of keys is applied to queries instead, and that of values to the attended latents: attention
itself is that of one KV head, and needs no kernel or store of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..architecture.layer_spec import Latent
from ..kernels.ops import LocalLinear, Operations

_EPSILON = 1e-6  # of the norms of latents, whatever that of the others is


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The weights of a layer's attention, but for those of the output. `query_scale` is a factor of the scores.

    A latent query or key is of `sizes.head_dim` numbers: see `_joined`.
    """

    sizes: Latent
    query_scale: float
    query_latent: LocalLinear | None  # [query_rank, hidden]
    query_norm: Tensor | None  # [query_rank]
    queries: LocalLinear  # [heads * (plain + rotated), query_rank or hidden]
    latent: LocalLinear  # [rank + rotated, hidden]
    latent_norm: Tensor  # [rank]
    keys: Sequence[LocalLinear]  # of each head [rank, plain]
    values: Sequence[LocalLinear]  # of each head [value_dim, rank]

    def attended(self, x: Tensor, do: Operations, attend: Callable[..., Tensor]) -> Tensor:
        """Return the outputs of all heads `[tokens, heads, value_dim]` for normalised rows `[tokens, hidden]`."""
        sizes, rows = self.sizes, x
        latent = self.latent(x).clone()  # before any norm, which may overwrite x
        if self.query_latent is not None and self.query_norm is not None:
            rows = do.norm(self.query_latent(x), self.query_norm, _EPSILON)
        q = self.queries(rows).view(len(x), -1, sizes.plain + sizes.rotated)
        plain, rotated = q.split((sizes.plain, sizes.rotated), dim=-1)
        q = _joined(_by_head(self.keys, plain), rotated) * self.query_scale
        latent, rotated = latent.split((sizes.rank, sizes.rotated), dim=-1)
        k = _joined(do.norm(latent.contiguous(), self.latent_norm, _EPSILON), rotated).unsqueeze(1)
        low, high = attend(q, k, k).chunk(2, dim=-1)
        skip = sizes.rotated // 2
        return _by_head(self.values, torch.cat((low[..., skip:], high[..., skip:]), dim=-1))

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the linears."""
        linears = (self.query_latent, self.queries, self.latent, *self.keys, *self.values)
        return [tensor for linear in linears if linear is not None for tensor in linear.tensors()]


def _joined(latent: Tensor, rotated: Tensor) -> Tensor:
    """Return both parts `[..., size]` as one vector, in each of its halves half of the rotated part first.

    RoPE rotates the first pairs of the two halves, as in every head that it rotates in part.
    """
    pairs = zip(rotated.chunk(2, dim=-1), latent.chunk(2, dim=-1), strict=True)
    return torch.cat([part for pair in pairs for part in pair], dim=-1)


def _by_head(linears: Sequence[LocalLinear], x: Tensor) -> Tensor:
    """Return the product of each head's linear with its part of `x` `[tokens, heads, in]`: `[tokens, heads, out]`."""
    inputs = x.transpose(0, 1).contiguous()
    outputs = torch.empty((len(linears), len(x), linears[0].outputs), dtype=x.dtype, device=x.device)
    for linear, rows, target in zip(linears, inputs, outputs, strict=True):
        linear.into(rows, target)
    return outputs.transpose(0, 1)
