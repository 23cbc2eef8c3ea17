"""Quantised weights for the native kernel: rounding, and its layout in panels of 16 outputs (types.h)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quantized import Quantized, QuantizedFormat, QuantizedTensor, StoredBlocks
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
    if kind.bits < 8:
        levels[:] = torch.tensor(kind.levels).repeat(LEVEL_COUNT // len(kind.levels))
        base = kind.levels[0] if kind.is_even else 1
    bits, groups = FLOAT8 if kind.is_float else kind.bits, kind.group // 32 if kind.wide else 0
    result = Format(bits, kind.nested, kind.has_minimum, groups, base)
    result.levels[:] = [x & 0xFFFF for x in levels.bfloat16().view(torch.int16).tolist()]
    return result


def pack_quantized(kernel: Kernel, weights: Sequence[Quantized]) -> Tensor:
    """Return weights `[out, in]` of one format below each other, as panels `[panels, in / block, bytes]`, uint8.

    The outputs of all but the last are a multiple of 16; those of the last are padded to one.
    """
    kind, outputs = weights[0].format, sum(weight.shape[0] for weight in weights)
    block_bytes = int(kind.bits_per_weight * BLOCK * kind.block) // 8
    packed = panel_memory((-(-outputs // BLOCK), weights[0].shape[1] // kind.block, block_bytes), torch.uint8)
    if outputs % BLOCK:
        packed[-1].zero_()
    panels = [-(-weight.shape[0] // BLOCK) for weight in weights]
    for weight, part in zip(weights, packed.split(panels), strict=True):
        if isinstance(weight, StoredBlocks):
            kernel.pack_blocks(weight.blocks, format_struct(kind), part, weight.inputs)
            continue
        kernel.pack(weight.codes, format_struct(kind), part)
        for numbers, place in _places(part, kind):
            own = getattr(weight, numbers.name)
            padded = F.pad(own, (0, 0, 0, -len(own) % BLOCK)) if len(own) % BLOCK else own
            rows = padded.view(-1, BLOCK, own.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)
            place.copy_(rows.unflatten(1, (*place.shape[1:3], numbers.amount)).flatten(3))
    return packed


class _Numbers(NamedTuple):
    """Scales, minima or factors of a format: `amount` of them for an output, in each block or in each of its groups."""

    name: str  # in a `QuantizedTensor`
    dtype: torch.dtype
    amount: int


def _places(packed: Tensor, kind: QuantizedFormat) -> Iterator[tuple[_Numbers, Tensor]]:
    """Yield a format's numbers, and views of their bytes `[panels, blocks, 1 or groups, bytes]` in its panels."""
    outer = ("scales", "minima") if kind.wide else ("factors", "minimum_factors") if kind.nested else ()
    start, dtype = 0, torch.float32 if kind.wide else torch.float16
    for name in outer[: 1 + kind.has_minimum]:
        end = start + BLOCK * dtype.itemsize
        yield _Numbers(name, dtype, 1), packed[..., start:end].unsqueeze(2)
        start = end
    if kind.wide:
        return
    groups, start = _groups(packed, kind), CODE_BYTES[kind.bits]
    dtype = torch.int8 if kind.nested else torch.float16
    for name, count in (("scales", 32 // kind.group), ("minima", 1))[: 1 + kind.has_minimum]:
        end = start + count * BLOCK * dtype.itemsize
        yield _Numbers(name, dtype, count), groups[..., start:end]
        start = end


def _groups(packed: Tensor, kind: QuantizedFormat) -> Tensor:
    """View the groups of blocks, `[panels, blocks, groups, bytes]`: codes, and maybe numbers behind them."""
    size = 4 if kind.wide else 2 if kind.nested else 0
    return packed[..., size * BLOCK * (1 + kind.has_minimum) :].unflatten(2, (kind.block // 32, -1))


def unpack_quantized(packed: Tensor, kind: QuantizedFormat, outputs: int) -> QuantizedTensor:
    """Return the weight `[out, in]` in panels of `pack_quantized`, in newly allocated memory; on any device."""
    numbers: dict[str, Tensor] = {}
    for own, place in _places(packed, kind):
        rows = place.contiguous().view(own.dtype).unflatten(3, (-1, BLOCK))
        numbers[own.name] = rows.permute(0, 4, 1, 2, 3).flatten(0, 1).flatten(1)[:outputs]
    return QuantizedTensor(kind, _codes(_groups(packed, kind)[..., : CODE_BYTES[kind.bits]], kind)[:outputs], **numbers)


def _codes(x: Tensor, kind: QuantizedFormat) -> Tensor:
    """Return the codes `[out, groups, 32]` in `x` `[panels, blocks, groups, bytes]`; types.h has their order."""
    if kind.bits == 8:
        fours = _by_group(x.unflatten(3, (8, BLOCK, 4)).permute(0, 4, 1, 2, 3, 5))
        if not kind.is_float:
            return fours.view(torch.int8)
        return fours.unflatten(2, (8, 2, 2)).transpose(3, 4).flatten(2).view(torch.float8_e4m3fn)
    low = x[..., :256].unflatten(3, (4, BLOCK, 4))
    codes = _by_group(torch.stack((low & 15, low >> 4), dim=-2).permute(0, 4, 1, 2, 3, 5, 6))
    if kind.bits == 4:
        return codes
    more = kind.bits - 4
    high = x[..., 256:].unflatten(3, (more, BLOCK, 1, 4))
    shifts = torch.arange(0, 8, more, dtype=torch.uint8, device=x.device).unsqueeze(-1)
    digits = (high >> shifts) & (1 << more) - 1
    return codes | _by_group(digits.permute(0, 4, 1, 2, 3, 5, 6)) << 4


def _by_group(parts: Tensor) -> Tensor:
    """Return `[panels * 16, groups, 32]` of `[panels, 16, blocks, groups, ...]`."""
    return parts.flatten(4).flatten(2, 3).flatten(0, 1)


def round_weight(kernel: Kernel, weight: Tensor, kind: QuantizedFormat) -> QuantizedTensor | None:
    """Round a matrix `[rows, inputs]` to Q4_1, Q5_1, Q6_K or Q8_0, in the bits of `quantize` (checkpoint.py).

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
