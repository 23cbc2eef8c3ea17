"""Conversions between the kernel's memory layouts and plain tensors, by torch. See types.h for the layouts."""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...system.platform import new_memory
from .structs import BLOCK

_SMALL = 2**16  # bytes: caches hold such a weight, or it is read in no time
_MAPPING = 2**26  # bytes that smaller weights share
_LINE = 64  # bytes of a cache line


def pack_weight(weight: Tensor) -> Tensor:
    """Return a weight `[out, in]` in panels of 16: `[panels, in / 2, 16, 2]` (bf16) or `[panels, in, 16]` (fp32).

    The last panel is padded with zeros. The number of inputs must be even, because the kernel multiplies pairs.
    """
    outputs, inputs = weight.shape
    whole = F.pad(weight, (0, 0, 0, -outputs % BLOCK)) if outputs % BLOCK else weight
    panels = whole.view(-1, BLOCK, inputs)
    # A pair of bf16 moves as one number of 4 bytes: torch copies runs of two elements several times as slowly.
    numbers = (panels if weight.dtype == torch.float32 else panels.view(torch.int32)).transpose(1, 2)
    packed = panel_memory(numbers.shape, numbers.dtype).copy_(numbers)
    return packed if weight.dtype == torch.float32 else packed.view(weight.dtype).unflatten(-1, (BLOCK, 2))


def panel_memory(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return uninitialised memory for the panels of a weight, in huge pages if there are any.

    Every step reads all weights: with pages of 4 KB, TLB misses take a quarter of the time of one token's products.
    Weights that are smaller than a few huge pages share a mapping, which is freed with the last of them.
    """
    count = math.prod(size)
    if count * dtype.itemsize < _SMALL:
        return torch.empty(size, dtype=dtype)
    memory, offset = _shared.place(count * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(size)


class _SharedMapping:
    """Gives out parts of mappings; the tensors in a mapping keep it alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapping: Callable[[], mmap.mmap | None] = lambda: None
        self._used = 0  # bytes

    def place(self, size: int) -> tuple[mmap.mmap, int]:
        """Return a mapping and the offset from which on `size` bytes of it are free."""
        if size > _MAPPING // 8:
            return new_memory(size), 0
        with self._lock:
            memory = self._mapping()
            if memory is None or self._used + size > len(memory):
                memory, self._used = new_memory(_MAPPING), 0
                self._mapping = weakref.ref(memory)
            offset, self._used = self._used, self._used + -(-size // _LINE) * _LINE
            return memory, offset


_shared = _SharedMapping()


def unpack_weight(packed: Tensor, outputs: int) -> Tensor:
    """Return the weight `[out, in]` that `pack_weight` has packed, in newly allocated memory; on any device."""
    if packed.dtype == torch.float32:
        return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:outputs]
    pairs = packed.flatten(2).view(torch.int32).transpose(1, 2)
    return pairs.reshape(-1, packed.shape[1]).view(packed.dtype)[:outputs]


def weight_rows(packed: Tensor, rows: Tensor) -> Tensor:
    """Return rows `[n, in]` of a packed weight; `rows` `[n]` are their numbers."""
    panel, lane = rows // BLOCK, rows % BLOCK
    if packed.dtype == torch.float32:
        return packed[panel, :, lane]
    return packed[panel, :, lane].flatten(1)


def _as_keys(part: Tensor, head_dim: int) -> Tensor:
    """View keys as blocks and panels have them, `[..., 16 * head_dim]`, as `key_view` does."""
    if part.dtype == torch.float32:
        return part.unflatten(-1, (head_dim, BLOCK)).transpose(-1, -2)
    return part.unflatten(-1, (head_dim // 2, BLOCK, 2)).transpose(-2, -3)


def key_view(blocks: Tensor, head_dim: int) -> Tensor:
    """View keys of blocks `[..., 2 * 16 * head_dim]`: `[..., 16, head_dim]`, in bf16 `[..., 16, head_dim / 2, 2]`."""
    return _as_keys(blocks.unflatten(-1, (2, -1)).select(-2, 0), head_dim)


def value_view(blocks: Tensor, head_dim: int) -> Tensor:
    """View values of blocks `[..., 2 * 16 * head_dim]`: `[..., 16, head_dim]`, in bf16 `[..., 8, 2, head_dim]`."""
    values = blocks.unflatten(-1, (2, -1)).select(-2, 1)
    if blocks.dtype == torch.float32:
        return values.unflatten(-1, (BLOCK, head_dim))
    return values.unflatten(-1, (BLOCK // 2, head_dim, 2)).transpose(-1, -2)


def keys_of(blocks: Tensor, head_dim: int) -> Tensor:
    """Return the keys `[..., 16, head_dim]` of blocks `[..., 2 * 16 * head_dim]`: a view in fp32, a copy in bf16."""
    keys = key_view(blocks, head_dim)
    return keys if blocks.dtype == torch.float32 else keys.flatten(-2)


def values_of(blocks: Tensor, head_dim: int) -> Tensor:
    """Return the values `[..., 16, head_dim]` of blocks `[..., 2 * 16 * head_dim]`: a view in fp32, a copy in bf16."""
    values = value_view(blocks, head_dim)
    return values if blocks.dtype == torch.float32 else values.flatten(-3, -2)


def new_key_panels(heads: int, keys: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return room for `keys` keys of each head in panels of 16, `[heads, panels, 16 * head_dim]`, not initialised."""
    return torch.empty((heads, -(-keys // BLOCK), BLOCK * head_dim), dtype=dtype)


def write_key_panels(panels: Tensor, start: int, keys: Tensor) -> None:
    """Write keys `[heads, n, head_dim]` to panels `[heads, panels, 16 * head_dim]` from key `start` on."""
    positions = torch.arange(start, start + keys.shape[1])
    panel, lane = positions // BLOCK, positions % BLOCK
    view, is_wide = _as_keys(panels, keys.shape[2]), panels.dtype == torch.float32
    view[:, panel, lane] = keys if is_wide else keys.to(panels.dtype).unflatten(-1, (-1, 2))


def mean_keys(blocks: Tensor, head_dim: int) -> Tensor:
    """Return the mean key `[..., head_dim]`, in fp32, of each block `[..., 2 * 16 * head_dim]`."""
    keys = blocks.unflatten(-1, (2, -1)).select(-2, 0)
    if blocks.dtype == torch.float32:
        return keys.unflatten(-1, (head_dim, BLOCK)).mean(-1)
    return keys.unflatten(-1, (head_dim // 2, BLOCK, 2)).mean(-2, dtype=torch.float32).flatten(-2)


def write_blocks(blocks: Tensor, head_dim: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write keys and values `[heads, n, head_dim]` to positions `[n]` of blocks `[heads, blocks, 2 * 16 * head_dim]`.

    Works on any device; on the CPU the kernel's `append` does this itself.
    """
    block, token = positions // BLOCK, positions % BLOCK
    if blocks.dtype == torch.float32:
        key_view(blocks, head_dim)[:, block, token] = keys
        value_view(blocks, head_dim)[:, block, token] = values
    else:
        key_view(blocks, head_dim)[:, block, token] = keys.unflatten(-1, (-1, 2))
        value_view(blocks, head_dim)[:, block, token // 2, token % 2] = values


def move_tokens(blocks: Tensor, head_dim: int, sources: Tensor, targets: Tensor) -> None:
    """Copy keys and values of tokens from positions `sources` `[n]` to `targets` `[n]`, which may overlap.

    `blocks` is `[heads, blocks, 2 * 16 * head_dim]`, on any device.
    """
    keys, values = key_view(blocks, head_dim), value_view(blocks, head_dim)
    (from_block, from_token), (to_block, to_token) = ((x // BLOCK, x % BLOCK) for x in (sources, targets))
    keys[:, to_block, to_token] = keys[:, from_block, from_token]
    if blocks.dtype == torch.float32:
        values[:, to_block, to_token] = values[:, from_block, from_token]
    else:
        values[:, to_block, to_token // 2, to_token % 2] = values[:, from_block, from_token // 2, from_token % 2]
