"""Unpacks keys and values that were packed in 12 bits without loss, by torch's operations on any device.

A run is 128 tokens of one KV head. Its bytes are the native kernel's (packed_kv.h); types.h there describes them.
"""

import torch
from torch import Tensor

from ..settings.kv_formats import PACKED_KV

TOKENS, SPAN, BLOCK = PACKED_KV.run, 32, 16
PATCHES = 30  # most values of a run that are stored apart
LISTS = 2 * TOKENS // SPAN  # of patches: of the keys and of the values of each span


def unpack_runs(runs: Tensor, head_dim: int, plane: bool = False) -> tuple[Tensor, Tensor]:
    """Return keys and values `[n, 128, head_dim]` of runs `[n, bytes]`: bit for bit, or what plane A alone has."""
    n, dim = len(runs), head_dim
    header, places = runs.shape[1] - 3 * TOKENS * dim, _places(dim, runs.device)
    high = runs[:, header + places].int()
    both = runs[:, header + 2 * TOKENS * dim :].view(n, -1, 64)
    low = torch.stack((both & 15, both >> 4), dim=2).flatten(1)[:, places].int()
    value_bases = runs[:, dim + _value_bases(dim, runs.device)[::2]]
    bases = torch.stack((runs[:, :dim], value_bases), dim=1).int()
    top = (high & 0x87).view(n, 2, TOKENS, dim) + bases.unsqueeze(2)
    bits = top.flatten(1) << 8 | (high << 1 & 0xF0) | (8 if plane else low)
    _apply_patches(bits, runs[:, 3 * dim : header], dim)
    keys, values = bits.to(torch.int16).view(torch.bfloat16).view(n, 2, TOKENS, dim).unbind(1)
    return keys, values


def _in_line(column: Tensor, word: Tensor) -> Tensor:
    """Return the byte of a line at which a word of one of its two columns is."""
    return 32 * column + word // 8 % 2 * 16 + word // 16 * 8 + word % 8


def _places(dim: int, device: torch.device) -> Tensor:
    """Return the byte of plane A of each key and value, `[2 * 128 * dim]`."""
    which, t, d = torch.meshgrid(*(torch.arange(x, device=device) for x in (2, TOKENS, dim)), indexing="ij")
    is_value = which == 1
    line = t // SPAN * dim + torch.where(is_value, dim // 2 + d // 32 * BLOCK + t % SPAN // 2, d // 2)
    column = torch.where(is_value, d // BLOCK % 2, t // BLOCK % 2)
    word = torch.where(is_value, d % BLOCK * 2 + t % 2, t % BLOCK * 2 + d % 2)
    return (64 * line + _in_line(column, word)).flatten()


def _value_bases(dim: int, device: torch.device) -> Tensor:
    """Return where the base of each dimension of the values is, for both tokens of a pair, `[2 * dim]`."""
    word = torch.arange(2 * dim, device=device)
    return word // 64 * 64 + _in_line(word // 32 % 2, word % 32)


def _apply_patches(bits: Tensor, memory: Tensor, dim: int) -> None:
    """Replace the values of `bits` `[n, 2 * 128 * dim]` that `memory` has lists of."""
    ends, slots = memory[:, :LISTS].long(), memory[:, LISTS : LISTS + 4 * PATCHES].long().unflatten(1, (-1, 4))
    run, slot = (torch.arange(PATCHES, device=bits.device) < ends[:, -1:]).nonzero().unbind(1)
    entry = slots[run, slot]
    at, value = entry[:, 0] | entry[:, 1] << 8, entry[:, 2] | entry[:, 3] << 8
    span_list = (slot[:, None] >= ends[run]).sum(1)
    which, word = span_list % 2, at % (BLOCK * dim)
    d = torch.where(which == 1, word // 2 % dim, word // 32 * 2 + word % 2)
    t = torch.where(which == 1, word // 2 // dim * 2 + word % 2, word // 2 % BLOCK)
    t += span_list // 2 * SPAN + at // (BLOCK * dim) * BLOCK
    bits[run, (which * TOKENS + t) * dim + d] = value.int()
