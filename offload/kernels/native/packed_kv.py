"""Packs keys and values of the native kernel's blocks in runs of 128 tokens, in 12 bits each, and back; see types.h."""

from __future__ import annotations

import torch
from torch import Tensor

from ...settings.kv_formats import PACKED_KV
from .checks import check, check_head_dim, require
from .kv_groups import check_packed_dim
from .structs import BLOCK, Packing

RUN_BLOCKS = PACKED_KV.run // BLOCK


def pack_call(blocks: Tensor, runs: Tensor, items: Tensor, fits: Tensor) -> Packing:
    """Return a call that packs runs of 8 blocks, and sets `fits` `[count]`, uint8, to whether each one could be.

    A run that has too many values to be stored apart cannot: some are lost in its memory then, and its blocks stay.

    Args:
        blocks: `[kv_heads, blocks, 2 * 16 * head_dim]`, bf16, contiguous.
        runs: `[kv_heads, runs, PACKED_KV.run_bytes(head_dim)]`, uint8, contiguous.
        items: `[count, 10]`, int32: KV head, number of the run, numbers of its blocks in order.
    """
    check("fits", fits, (len(items),), torch.uint8)
    return _call(blocks, runs, items, fits=fits.data_ptr())


def unpack_call(runs: Tensor, items: Tensor, blocks: Tensor, plane: bool = False) -> Packing:
    """Return a call that unpacks runs to their blocks, bit for bit; arguments are those of `pack_call`.

    With `plane`, only plane A is read: a normal number is off by at most 2^-4 of itself, and not to one side; others
    by at most 2^-130. Values that are stored apart are as they were.
    """
    return _call(blocks, runs, items, plane=plane)


def _call(blocks: Tensor, runs: Tensor, items: Tensor, **own: int) -> Packing:
    head_dim = blocks.shape[-1] // (2 * BLOCK)
    check_head_dim(head_dim)
    check_packed_dim(head_dim)
    check("items", items, (len(items), 2 + RUN_BLOCKS), torch.int32)
    check("blocks", blocks, (*blocks.shape[:2], 2 * BLOCK * head_dim), torch.bfloat16)
    check("runs", runs, (*runs.shape[:2], PACKED_KV.run_bytes(head_dim)), torch.uint8)
    require(len(runs) == len(blocks), "runs and blocks have other heads")
    return Packing(
        kv=blocks.data_ptr(),
        packed=runs.data_ptr(),
        runs=items.data_ptr(),
        head_stride=blocks.stride(0) * blocks.itemsize,
        packed_stride=runs.stride(0),
        count=len(items),
        head_dim=head_dim,
        **own,
    )
