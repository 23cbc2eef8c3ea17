"""Quantised weights for the native kernel: rounding, and its layout in panels of 16 outputs (types.h)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quantized import QuantizedFormat, QuantizedTensor
from .checks import require
from .kernel import Kernel
from .layout import panel_memory
from .structs import BLOCK, FLOAT8, LEVEL_COUNT, Format, Rounding

CODE_BYTES = {4: 256, 5: 320, 6: 384, 8: 512}  # of a group of 32 inputs and 16 outputs
REFITS = 2  # least-squares fits of a rounded weight: each next one gains half as much as the last one


@cache
def format_struct(kind: QuantizedFormat) -> Format:
    """Return the format as the kernel takes it."""
    levels, base = torch.zeros(LEVEL_COUNT), 0
    if kind.is_float:
        levels = 2**-9 * (torch.arange(LEVEL_COUNT) % 8)  # e4m3's subnormal numbers
    elif kind.bits < 8:
        levels[:] = torch.tensor(kind.levels).repeat(LEVEL_COUNT // len(kind.levels))
        base = kind.levels[0] if kind.is_even else 1
    bits, groups = FLOAT8 if kind.is_float else kind.bits, kind.group // 32 if kind.wide else 0
    result = Format(bits, kind.nested, kind.has_minimum, groups, base)
    result.levels[:] = [x & 0xFFFF for x in levels.bfloat16().view(torch.int16).tolist()]
    return result


def pack_quantized(kernel: Kernel, weights: Sequence[QuantizedTensor]) -> Tensor:
    """Return weights `[out, in]` of one format below each other, as panels `[panels, in / block, bytes]`, uint8.

    The outputs of all but the last are a multiple of 16; those of the last are padded to one.
    """
    kind, outputs = weights[0].format, sum(weight.shape[0] for weight in weights)
    size = (-(-outputs // BLOCK), weights[0].shape[1] // kind.block, _block_bytes(kind))
    packed = panel_memory(size, torch.uint8)
    if outputs % BLOCK:
        packed[-1].zero_()
    panels = [-(-weight.shape[0] // BLOCK) for weight in weights]
    for weight, part in zip(weights, packed.split(panels), strict=True):
        kernel.pack(weight.codes, format_struct(kind), part)
        _write_numbers(weight, part)
    return packed


def _block_bytes(kind: QuantizedFormat) -> int:
    return int(kind.bits_per_weight * BLOCK * kind.block) // 8


def _write_numbers(weight: QuantizedTensor, packed: Tensor) -> None:
    """Write scales, minima and factors to their places: what belongs to a block before its codes."""
    kind, own = weight.format, (weight.scales, weight.minima)
    at = 0
    for x in own if kind.wide else (weight.factors, weight.minimum_factors):
        if x is not None:
            numbers = _numbers(x, 1)
            packed[..., at : at + numbers.shape[2]] = numbers
            at += numbers.shape[2]
    if kind.wide:
        return
    groups = kind.block // 32
    places, at = packed[..., at:].unflatten(2, (groups, -1)), CODE_BYTES[kind.bits]
    for x, each in zip(own, (32 // kind.group, 1), strict=True):
        if x is not None:
            found = _numbers(x, each).unflatten(1, (-1, groups))
            places[..., at : at + found.shape[3]] = found
            at += found.shape[3]


def _numbers(x: Tensor, each: int) -> Tensor:
    """Return scales or minima `[out, n]`, `each` of them for a group, as bytes `[panels, groups, bytes]`."""
    padded = F.pad(x, (0, 0, 0, -len(x) % BLOCK)) if len(x) % BLOCK else x
    panels = padded.view(-1, BLOCK, x.shape[1]).transpose(1, 2).contiguous()
    return panels.view(torch.uint8).unflatten(1, (-1, each)).flatten(2)


def unpack_quantized(packed: Tensor, kind: QuantizedFormat, outputs: int) -> QuantizedTensor:
    """Return the weight `[out, in]` in panels of `pack_quantized`, in newly allocated memory; on any device."""
    found, at = {}, 0
    if kind.wide or kind.nested:
        dtype = torch.float32 if kind.wide else torch.float16
        for name in (("scales", "minima") if kind.wide else ("factors", "minimum_factors"))[: 1 + kind.has_minimum]:
            end = at + BLOCK * dtype.itemsize
            found[name], at = _by_row(packed[..., at:end].unsqueeze(2), dtype), end
    groups, at = packed[..., at:].unflatten(2, (kind.block // 32, -1)), CODE_BYTES[kind.bits]
    codes = _codes(groups[..., :at], kind)
    if not kind.wide:
        dtype = torch.int8 if kind.nested else torch.float16
        for name, each in (("scales", 32 // kind.group), ("minima", 1))[: 1 + kind.has_minimum]:
            end = at + each * BLOCK * dtype.itemsize
            found[name], at = _by_row(groups[..., at:end], dtype), end
    return QuantizedTensor(kind, codes[:outputs], **{name: x[:outputs] for name, x in found.items()})


def _by_row(places: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers `[out, n]` whose bytes are at `places` `[panels, blocks, groups, bytes]`."""
    numbers = places.contiguous().view(dtype).unflatten(3, (-1, BLOCK))
    return numbers.permute(0, 4, 1, 2, 3).flatten(0, 1).flatten(1)


def _codes(x: Tensor, kind: QuantizedFormat) -> Tensor:
    """Return the codes `[out, groups, 32]` in `x` `[panels, blocks, groups, bytes]`; types.h has their order."""
    if kind.bits == 8:
        pairs = x.unflatten(3, (16, BLOCK, 2)).permute(0, 4, 1, 2, 3, 5)
        return _by_group(pairs).view(torch.float8_e4m3fn if kind.is_float else torch.int8)
    low = x[..., :256].unflatten(3, (4, BLOCK, 2, 2))  # quads, outputs, members, bytes
    codes = _by_group(torch.stack((low & 15, low >> 4), dim=-1).permute(0, 4, 1, 2, 3, 6, 7, 5))
    if kind.bits == 4:
        return codes
    each = kind.bits - 4
    high = x[..., 256:].unflatten(3, (each, BLOCK, 2, 2))  # parts, outputs, members, bytes
    shifts = torch.arange(0, 8, each, dtype=torch.uint8, device=x.device)
    digits = (high.unsqueeze(-1) >> shifts) & (1 << each) - 1
    return codes | _by_group(digits.permute(0, 4, 1, 2, 3, 6, 7, 5)) << 4


def _by_group(parts: Tensor) -> Tensor:
    """Return `[panels * 16, groups, 32]` of `[panels, 16, blocks, groups, ...]`."""
    return parts.flatten(4).flatten(2, 3).flatten(0, 1)


def round_weight(kernel: Kernel, weight: Tensor, kind: QuantizedFormat) -> QuantizedTensor | None:
    """Round a matrix `[rows, inputs]` to Q4_1, Q5_1, Q6_K or Q8_0, in the bits of loading/formats/quantization.py.

    Its inputs are whole blocks of the format. Returns None for weights that are not finite or are too large for scales
    in fp16.
    """
    if weight.dtype != torch.bfloat16:
        weight = weight.float()
    weight, (rows, inputs) = weight.contiguous(), weight.shape
    require(kind.bits in (4, 5, 6, 8) and not kind.wide and inputs % kind.block == 0, "no whole blocks of the format")
    codes = torch.empty((rows, inputs // 32, 32), dtype=torch.int8 if kind.bits == 8 else torch.uint8)
    scales = torch.empty((rows, inputs // kind.group), dtype=torch.int8 if kind.nested else torch.float16)
    halves = torch.empty((rows, inputs // kind.block), dtype=torch.float16)  # minima, or factors
    call = Rounding(
        weight=weight.data_ptr(),
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        minima=halves.data_ptr(),
        groups=halves.numel(),
        bits=kind.bits,
        wide=weight.dtype == torch.float32,
        fits=1 + REFITS,
    )
    if not kernel.round(call):
        return None
    return QuantizedTensor(
        kind, codes, scales, halves if kind.has_minimum else None, factors=halves if kind.nested else None
    )
