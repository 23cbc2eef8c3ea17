"""The kernel's layouts, in torch: weights into panels, blocks back into rows. See types.h."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .library import BLOCK


def pack_weight(weight: Tensor) -> Tensor:
    """`[out, in]` -> panels of 16 outputs `[panels, in / 2, 16, 2]` (bf16) or `[panels, in, 16]` (fp32).

    The last panel is filled up with zeros. The number of inputs is even: the kernel multiplies pairs.
    """
    outputs, inputs = weight.shape
    whole = F.pad(weight, (0, 0, 0, -outputs % BLOCK)) if outputs % BLOCK else weight
    panels = whole.view(-1, BLOCK, inputs)
    if weight.dtype == torch.float32:
        return panels.transpose(1, 2).contiguous()
    # A pair of bf16 moves as one number of 4 bytes: torch copies runs of two elements several times as slowly.
    pairs = panels.view(torch.int32).transpose(1, 2).contiguous()
    return pairs.view(weight.dtype).unflatten(-1, (BLOCK, 2))


def weight_rows(packed: Tensor, rows: Tensor) -> Tensor:
    """Rows `[n]` of a packed weight, `[n, in]`."""
    panel, lane = rows // BLOCK, rows % BLOCK
    if packed.dtype == torch.float32:
        return packed[panel, :, lane]
    return packed[panel, :, lane].flatten(1)


def keys_of(blocks: Tensor, head_dim: int) -> Tensor:
    """The keys of blocks `[..., 2 * 16 * head_dim]`, `[..., 16, head_dim]`: views, or copies where bf16 is paired."""
    keys = blocks.unflatten(-1, (2, -1)).select(-2, 0)
    if blocks.dtype == torch.float32:
        return keys.unflatten(-1, (head_dim, BLOCK)).transpose(-1, -2)
    return keys.unflatten(-1, (head_dim // 2, BLOCK, 2)).transpose(-2, -3).flatten(-2)


def values_of(blocks: Tensor, head_dim: int) -> Tensor:
    """The values of blocks `[..., 2 * 16 * head_dim]`, `[..., 16, head_dim]`: views, or copies where bf16 is paired."""
    values = blocks.unflatten(-1, (2, -1)).select(-2, 1)
    if blocks.dtype == torch.float32:
        return values.unflatten(-1, (BLOCK, head_dim))
    return values.unflatten(-1, (BLOCK // 2, head_dim, 2)).transpose(-1, -2).flatten(-3, -2)


def mean_keys(blocks: Tensor, head_dim: int) -> Tensor:
    """The mean key of each block `[..., 2 * 16 * head_dim]`, in fp32 `[..., head_dim]`."""
    keys = blocks.unflatten(-1, (2, -1)).select(-2, 0)
    if blocks.dtype == torch.float32:
        return keys.unflatten(-1, (head_dim, BLOCK)).mean(-1)
    return keys.unflatten(-1, (head_dim // 2, BLOCK, 2)).mean(-2, dtype=torch.float32).flatten(-2)


def write_blocks(blocks: Tensor, head_dim: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write tokens to positions `[n]` of runs of blocks `[runs, blocks, 2 * 16 * head_dim]`.

    keys and values `[runs, n, head_dim]`; on any device: where the kernel runs it does this itself.
    """
    block, token = positions // BLOCK, positions % BLOCK
    key_part, value_part = blocks.unflatten(-1, (2, -1)).unbind(-2)
    if blocks.dtype == torch.float32:
        key_part.unflatten(-1, (head_dim, BLOCK)).transpose(-1, -2)[:, block, token] = keys
        value_part.unflatten(-1, (BLOCK, head_dim))[:, block, token] = values
        return
    pairs = key_part.unflatten(-1, (head_dim // 2, BLOCK, 2)).transpose(-2, -3)  # [.., token, pair, 2]
    pairs[:, block, token] = keys.unflatten(-1, (-1, 2))
    tokens = value_part.unflatten(-1, (BLOCK // 2, head_dim, 2)).transpose(-1, -2)  # [.., pair, 2, head_dim]
    tokens[:, block, token // 2, token % 2] = values
