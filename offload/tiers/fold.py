"""Joins the partials of a layer, in their order, for rows that have not all seen the same pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention import Partial


class Part(NamedTuple):
    """The partial of some of the rows."""

    rows: slice
    partial: Partial


def fold(parts: Sequence[Part], like: Tensor) -> Tensor:
    """Attention over all parts' keys, in the shape and type of `like` `[tokens, heads, head_dim]`.

    As `merge`, but one part after the other: what other rows have seen does not change the last bit of a row's sum.
    """
    top = torch.full(like.shape[:2], float("-inf"), device=like.device)
    for rows, part in parts:
        torch.maximum(top[rows], part.lse, out=top[rows])
    total = torch.zeros_like(top)
    out = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    for rows, part in parts:
        weight = (part.lse - top[rows]).exp_()
        total[rows] += weight
        out[rows].addcmul_(part.out.float(), weight.unsqueeze(-1))
    return out.div_(total.unsqueeze(-1)).to(like.dtype)
