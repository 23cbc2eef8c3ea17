"""The native kernel's layout of quantised weights: panels of 16 outputs, see types.h."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quantized import BLOCK_GROUPS, QuantizedFormat, QuantizedTensor
from .kernel import Kernel
from .library import BLOCK, LEVEL_COUNT, Format

CODE_BYTES = {4: 256, 5: 320, 6: 384, 8: 512}  # of a group of 32 inputs and 16 outputs


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


def pack_quantized(kernel: Kernel, weight: QuantizedTensor) -> Tensor:
    """Return a weight `[out, in]` as panels `[panels, in / block, bytes]`, uint8; outputs are padded to 16."""
    kind, format = weight.format, format_struct(weight.format)
    outputs, inputs = weight.shape
    groups, factors = (BLOCK_GROUPS if kind.nested else 1), (weight.factors, weight.minimum_factors)
    header = sum(2 * BLOCK for x in factors if x is not None)
    numbers = [_numbers(weight.scales, 32 // kind.group)]
    if weight.minima is not None:
        numbers.append(_numbers(weight.minima, 1))
    scales = torch.cat(numbers, dim=-1)  # [panels, groups, bytes]
    group = CODE_BYTES[kind.bits] + scales.shape[2]
    packed = torch.zeros((-(-outputs // BLOCK), inputs // kind.block, header + groups * group), dtype=torch.uint8)
    kernel.pack(weight.codes.contiguous(), format, packed)
    packed[..., header:].unflatten(2, (groups, group))[..., -scales.shape[2] :] = scales.unflatten(1, (-1, groups))
    for at, x in enumerate(x for x in factors if x is not None):
        packed[..., 2 * BLOCK * at : 2 * BLOCK * (at + 1)] = _numbers(x, 1)
    return packed


def _numbers(x: Tensor, each: int) -> Tensor:
    """Return scales or minima `[out, n]`, `each` of them for a group, as bytes `[panels, groups, bytes]`."""
    padded = F.pad(x, (0, 0, 0, -len(x) % BLOCK)) if len(x) % BLOCK else x
    panels = padded.view(-1, BLOCK, x.shape[1]).transpose(1, 2).contiguous()
    return panels.view(torch.uint8).unflatten(1, (-1, each)).flatten(2)
