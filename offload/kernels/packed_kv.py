"""Packs keys and values in 12 bits without loss, and back, by torch's operations on any device.

A run is 128 tokens of one KV head. Its bytes are the native kernel's (packed_kv.h); types.h there describes them.
"""

import torch
from torch import Tensor

from ..settings.kv_formats import PACKED_KV

TOKENS, SPAN, BLOCK = PACKED_KV.run, 32, 16
PATCHES = 30  # most values of a run that are stored apart
LISTS = 2 * TOKENS // SPAN  # of patches: of the keys and of the values of each span


def pack_runs(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return runs `[n, bytes]`, uint8, of keys and values `[n, 128, head_dim]` in bf16, and whether each fits, `[n]`.

    One that has more than 30 values outside its channels' exponents does not fit: others of them are lost in its bytes.
    """
    n, _, dim = keys.shape
    bits = torch.stack((keys, values), dim=1).view(torch.int16).int() & 0xFFFF  # [n, 2, tokens, dim]
    exponents = bits >> 7 & 255
    bases = _bases(exponents)
    codes = exponents - bases.unsqueeze(2)
    is_coded = (codes >= 0) & (codes < 16) & (exponents < 255)
    high = (bits >> 8 & 128) | (codes & 1) << 6 | (bits >> 4 & 7) << 3 | codes >> 1
    runs = torch.zeros((n, PACKED_KV.run_bytes(dim)), dtype=torch.uint8, device=keys.device)
    header, places = runs.shape[1] - 3 * TOKENS * dim, _places(dim, keys.device)
    runs[:, header + places] = high.where(is_coded, 0).flatten(1).byte()
    lines = torch.zeros((n, 2 * TOKENS * dim), dtype=torch.uint8, device=keys.device)
    lines[:, places] = (bits & 15).where(is_coded, 0).flatten(1).byte()
    lines = lines.view(n, -1, 2, 64)  # two lines share bytes
    runs[:, header + 2 * TOKENS * dim :] = (lines[:, :, 0] | lines[:, :, 1] << 4).flatten(1)
    runs[:, :dim] = bases[:, 0].byte() >> 1
    runs[:, dim + _value_bases(dim, keys.device)] = bases[:, 1].repeat_interleave(2, 1).byte() >> 1
    fits = _write_patches(runs[:, 3 * dim : header], bits, is_coded)
    return runs, fits


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


def _bases(exponents: Tensor) -> Tensor:
    """Return for each channel `[n, 2, dim]` the largest even exponent from which on 16 are those of the most tokens."""
    best, most = torch.zeros_like(exponents[:, :, 0]), torch.full_like(exponents[:, :, 0], -1)
    for base in range(0, 242, 2):
        count = ((exponents >= base) & (exponents < min(base + 16, 255))).sum(2, dtype=torch.int32)
        best, most = torch.where(count >= most, base, best), torch.maximum(count, most)
    return best


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


def _write_patches(memory: Tensor, bits: Tensor, is_coded: Tensor) -> Tensor:
    """Write the lists of values that are not coded to `memory` `[n, bytes]`; return whether there is room, `[n]`."""
    dim = bits.shape[3]
    lists = (~is_coded).unflatten(2, (-1, SPAN)).permute(0, 2, 1, 4, 3)  # run, span, which, dimension, token
    ends = lists.flatten(3).sum(3).flatten(1).cumsum(1)  # [n, LISTS]
    run, span, which, d, t = lists.nonzero().unbind(1)
    rank = torch.arange(len(run), device=run.device) - (ends[:, -1].cumsum(0) - ends[:, -1])[run]
    words = torch.where(which == 1, (t % BLOCK // 2 * dim + d) * 2 + t % 2, (d // 2 * BLOCK + t % BLOCK) * 2 + d % 2)
    at, value = t // BLOCK * BLOCK * dim + words, bits[run, which, span * SPAN + t, d]
    memory[:, :LISTS] = ends.clamp(max=PATCHES)
    kept = rank < PATCHES
    for offset, byte in enumerate((at & 255, at >> 8, value & 255, value >> 8)):
        memory[run[kept], LISTS + 4 * rank[kept] + offset] = byte[kept].byte()
    return ends[:, -1] <= PATCHES


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
