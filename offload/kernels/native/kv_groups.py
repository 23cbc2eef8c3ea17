"""Quantised keys and values (KIVI, arXiv 2402.02750) in the native kernel's groups of 32 tokens; see types.h.

Keys share a scale and a middle per channel and group, values per token. Both are chosen so that no number is clamped.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...settings.kv_formats import PACKED_KV, PLANE_KV
from .checks import FLOATS, check, check_head_dim, require
from .structs import BLOCK, PACKED, PLANE, SPAN, Format, Quantize

_PACKED = {PACKED_KV.name: PACKED, PLANE_KV.name: PLANE}


@cache
def kv_format(name: str) -> Format:
    """Return a format of keys and values as the kernel takes it, by its name in the table of formats.

    "packed" is that of keys and values in 12 bits without loss, "plane" that of their plane of 8 bits alone.
    """
    return Format(_PACKED.get(name, 8))


@dataclass(frozen=True)
class Groups:
    """A layer's quantised groups, or packed runs: `[kv_heads, groups, bytes]`, uint8, contiguous."""

    memory: Tensor
    format: Format

    @property
    def is_packed(self) -> bool:
        """Whether these are runs of bf16 keys and values, packed without loss."""
        return self.format.bits in _PACKED.values()


def check_packed_dim(head_dim: int) -> None:
    """Raise InvalidCall if keys and values of so many dimensions cannot be packed."""
    require(head_dim % 32 == 0, f"only heads of a multiple of 32 dimensions can be packed, not of {head_dim}")


def check_groups(groups: Groups, kv_heads: int, head_dim: int) -> None:
    """Raise InvalidCall if these are not groups or runs of that many heads or more, of that dimension."""
    check_head_dim(head_dim)
    if groups.is_packed:
        check_packed_dim(head_dim)
        size = (PLANE_KV if groups.format.bits == PLANE else PACKED_KV).run_bytes(head_dim)
    else:
        size = 4 * (head_dim + SPAN) + head_dim * SPAN * 2
    memory = groups.memory
    require(memory.dim() == 3 and len(memory) >= kv_heads, "there are no groups of some heads")
    check("groups", memory, (*memory.shape[:2], size), torch.uint8)


def quantize_call(blocks: Tensor, groups: Groups, items: Tensor, head_dim: int) -> Quantize:
    """Return a call that quantises groups.

    Args:
        blocks: `[kv_heads, blocks, 2 * 16 * head_dim]`, bf16 or fp32, contiguous.
        items: `[count, 3]`, int32: KV head, number of the first of two consecutive blocks, number of the group.
    """
    check("blocks", blocks, (*blocks.shape[:2], 2 * BLOCK * head_dim), *FLOATS)
    return _call(
        groups, items, head_dim, blocks.dtype, kv=blocks.data_ptr(), head_stride=blocks.stride(0) * blocks.itemsize
    )


def dequantize_call(groups: Groups, items: Tensor, keys: Tensor, values: Tensor) -> Quantize:
    """Return a call that dequantises groups to keys and values `[count, 32, head_dim]`, bf16 or fp32.

    `items` is that of `quantize_call`; the blocks' numbers are not read.
    """
    check("keys", keys, (len(items), SPAN, keys.shape[2]), *FLOATS)
    check("values", values, keys.shape, keys.dtype)
    return _call(groups, items, keys.shape[2], keys.dtype, keys=keys.data_ptr(), values=values.data_ptr())


def _call(groups: Groups, items: Tensor, head_dim: int, dtype: torch.dtype, **own: int) -> Quantize:
    check("items", items, (len(items), 3), torch.int32)
    require(not groups.is_packed, "packed runs are no quantised groups")
    check_groups(groups, 1, head_dim)
    return Quantize(
        quantized=groups.memory.data_ptr(),
        groups=items.data_ptr(),
        quantized_stride=groups.memory.stride(0),
        count=len(items),
        head_dim=head_dim,
        wide=dtype == torch.float32,
        format=ctypes.addressof(groups.format),
        **own,
    )
