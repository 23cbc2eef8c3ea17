"""RMSNorm of q and k over the heads of all ranks together."""

from __future__ import annotations

import torch
from torch import Tensor

from .group import Group


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
        """Return the weights."""
        return list(self._weights)

    def over(self, tensors: list[Tensor]) -> JoinedNorm:
        """Return the same norms with other weights."""
        return JoinedNorm((tensors[0], tensors[1]), self._widths, self._counts_keys, self._group)
