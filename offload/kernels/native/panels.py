"""The native kernel's layout of quantised weights: panels of 16 outputs, see types.h."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quantized import BLOCK_GROUPS, QuantizedFormat, QuantizedTensor
from .library import BLOCK, LEVEL_COUNT, Format


@cache
def format_struct(kind: QuantizedFormat) -> Format:
    """Return the format as the kernel takes it."""
    levels, base = torch.zeros(LEVEL_COUNT), 0
    if kind.bits < 8:
        levels[:] = torch.tensor(kind.levels).repeat(LEVEL_COUNT // len(kind.levels))
        even = kind.levels == tuple(range(kind.levels[0], kind.levels[0] + len(kind.levels)))
        base = kind.levels[0] if even else 1
    result = Format(kind.bits, kind.nested, kind.has_minimum, base)
    result.levels[:] = [x & 0xFFFF for x in levels.bfloat16().view(torch.int16).tolist()]
    return result


def block_inputs(format: Format) -> int:
    """Return the inputs of a block of a panel."""
    return 32 * BLOCK_GROUPS if format.nested else 32


def pack_quantized(weight: QuantizedTensor) -> Tensor:
    """Return a weight `[out, in]` as panels `[panels, in / block, bytes]`, uint8; outputs are padded to 16."""
    kind = weight.format
    groups = BLOCK_GROUPS if kind.nested else 1
    parts = [_codes(weight.codes, kind.bits), _numbers(weight.scales, 32 // kind.group)]
    if weight.minima is not None:
        parts.append(_numbers(weight.minima, 1))
    body = torch.cat(parts, dim=-1).unflatten(1, (-1, groups)).flatten(2)  # [panels, blocks, bytes]
    factors = [_numbers(x, 1) for x in (weight.factors, weight.minimum_factors) if x is not None]
    return torch.cat((*factors, body), dim=-1) if factors else body.contiguous()


def _panels(x: Tensor) -> Tensor:
    """Return rows `[out, n]` as `[panels, 16, n]`, padded with zeros."""
    return (F.pad(x, (0, 0, 0, -len(x) % BLOCK)) if len(x) % BLOCK else x).view(-1, BLOCK, x.shape[1])


def _numbers(x: Tensor, each: int) -> Tensor:
    """Return scales or minima, `each` of them for a group, as bytes `[panels, groups, bytes]`."""
    return _panels(x).transpose(1, 2).contiguous().view(torch.uint8).unflatten(1, (-1, each)).flatten(2)


def _codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes `[out, in]` as bytes `[panels, groups, bytes]`."""
    pairs = _panels(codes).view(torch.int16).transpose(1, 2).contiguous().view(torch.uint8)  # [panels, in / 2, 32]
    grouped = pairs.unflatten(1, (-1, 16)).unflatten(2, (4, 4))  # [panels, groups, quads, pairs, 32]
    if bits == 8:
        return grouped.flatten(2)
    low = grouped & 15 if bits > 4 else grouped
    digits = low[..., 0::2, :] | low[..., 1::2, :] << 4  # [panels, groups, quads, bytes of a digit, 32]
    parts = [digits.transpose(-1, -2).flatten(2)]
    if bits == 5:
        fifth = _joined(grouped >> 4, 1)  # four bits of each quad
        parts.append((fifth[..., 0::2, :] | fifth[..., 1::2, :] << 4).transpose(-1, -2).flatten(2))
    if bits == 6:
        parts.append(_joined(grouped >> 4, 2).unflatten(2, (2, 2)).transpose(-1, -2).flatten(2))
    return torch.cat(parts, dim=-1)


def _joined(x: Tensor, bits: int) -> Tensor:
    """Join the `bits` of a quad's four pairs in one byte: `[..., 4, 32]` -> `[..., 32]`."""
    return x[..., 0, :] | x[..., 1, :] << bits | x[..., 2, :] << 2 * bits | x[..., 3, :] << 3 * bits
