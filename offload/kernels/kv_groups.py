"""Quantises keys and values, and back, by torch's operations on any device: the native kernel's groups (see types.h).

The numbers and their layout are those of kernels/native/kv_groups.h: scales and middles for each channel of keys and
for each token of values (KIVI, arXiv 2402.02750), in groups of 32 tokens.
"""

import torch
from torch import Tensor

from ..architecture.kv_formats import BLOCK, GROUP
from ..settings.kv_formats import KV_FORMATS, KVFormat

_SMALLEST = 2.0**-126  # a scale below it has no inverse
_LINE = 64  # codes


def quantize_groups(keys: Tensor, values: Tensor, kind: str) -> Tensor:
    """Return groups `[..., bytes]`, uint8, of keys and values `[..., 32, head_dim]` in a quantised format."""
    format = KV_FORMATS[kind]
    (key_scales, key_middles, key_codes), (value_scales, value_middles, value_codes) = (
        _quantized(x.float(), dim, format) for x, dim in ((keys, -2), (values, -1))
    )
    numbers = torch.cat([x.flatten(-2) for x in (key_scales, key_middles, value_scales, value_middles)], dim=-1)
    lines = (_packed(x, format) for x in (_key_lines(key_codes), _value_lines(value_codes)))
    return torch.cat((numbers.bfloat16().view(torch.uint8), *lines), dim=-1)


def dequantize_groups(groups: Tensor, head_dim: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values `[..., 32, head_dim]` of groups `[..., bytes]`."""
    (numbers, codes), format = _parts(groups, head_dim), KV_FORMATS[kind]
    scales, middles = numbers[..., 2 * head_dim :].unsqueeze(-1).chunk(2, dim=-2)
    values = _levels(_values_of_lines(_unpacked(codes[1], format), head_dim), format).mul_(scales).add_(middles)
    return dequantize_keys(groups, head_dim, kind).to(dtype), values.to(dtype)


def dequantize_keys(groups: Tensor, head_dim: int, kind: str) -> Tensor:
    """Return keys `[..., 32, head_dim]` in fp32 of groups `[..., bytes]`."""
    (numbers, codes), format = _parts(groups, head_dim), KV_FORMATS[kind]
    scales, middles = numbers[..., : 2 * head_dim].unsqueeze(-2).chunk(2, dim=-1)
    return _levels(_keys_of_lines(_unpacked(codes[0], format), head_dim), format).mul_(scales).add_(middles)


def _parts(groups: Tensor, head_dim: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return scales and middles of groups in fp32, and the bytes of the codes of keys and of values."""
    header = 4 * head_dim + 4 * GROUP
    keys, values = groups[..., header:].chunk(2, dim=-1)
    return groups[..., :header].view(torch.bfloat16).float(), (keys, values)


def _quantized(x: Tensor, dim: int, format: KVFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales, middles and codes (uint8) of fp32 numbers that share a scale along `dim`, which stays as 1.

    Both are NaN if one of the numbers is not finite.
    """
    least, most = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale, middle = _float8_grid(least, most) if format.is_float else _integer_grid(least, most, format)
    is_finite = least.isfinite() & most.isfinite()
    has_codes = is_finite & (scale >= _SMALLEST)  # else the numbers are equal, too close, or not finite
    inverse = torch.where(has_codes, 1 / scale, 0.0)
    steps = torch.where(has_codes, (x - middle) * inverse, 0.0)
    if format.is_float:
        codes = steps.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        below = 1 << format.bits - 1
        codes = steps.clamp_(-below, below - 1).round_().to(torch.int8).view(torch.uint8)
    scale, middle = (torch.where(is_finite, number, torch.nan) for number in (scale, middle))
    return scale, middle, codes


def _integer_grid(least: Tensor, most: Tensor, format: KVFormat) -> tuple[Tensor, Tensor]:
    """Return scales and middles, which bf16 represents, with which no number is clamped."""
    below = 1 << format.bits - 1
    share = below / (2 * below - 1)
    middle = (least + (most * share - least * share)).bfloat16().float()
    scale = torch.maximum((most - middle) / (below - 1), (middle - least) / below)
    bits = scale.view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32), middle  # the bf16 above it, or its own


def _float8_grid(least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest powers of two by which 448, the largest e4m3 number, reaches all numbers; middles of 0."""
    size = torch.maximum(most, -least)
    bits = size.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0x600000) - 8  # 448 is 1.75 * 2^8
    scale = (exponent.clamp(min=1) << 23).view(torch.float32)
    return torch.where(size > 0, scale, 0.0), torch.zeros_like(size)


def _levels(codes: Tensor, format: KVFormat) -> Tensor:
    """Return the numbers that codes (uint8) stand for, in fp32."""
    if format.is_float:
        return codes.view(torch.float8_e4m3fn).float()
    if format.bits == 4:
        return (codes.view(torch.int8) ^ 8).float() - 8
    return codes.view(torch.int8).float()


def _packed(lines: Tensor, format: KVFormat) -> Tensor:
    """Return lines of codes `[..., lines, 64]` as bytes `[..., n]`; of 4 bits, two lines share 64 bytes."""
    if format.bits == 4:
        low, high = lines.unflatten(-2, (-1, 2)).unbind(-2)
        lines = low & 15 | high << 4
    return lines.flatten(-2)


def _unpacked(codes: Tensor, format: KVFormat) -> Tensor:
    """Return lines of codes `[..., lines, 64]` of bytes `[..., n]`."""
    lines = codes.unflatten(-1, (-1, _LINE))
    if format.bits == 4:
        lines = torch.stack((lines & 15, lines >> 4), dim=-2).flatten(-3, -2)
    return lines


def _key_lines(codes: Tensor) -> Tensor:
    """Return codes `[..., 32, head_dim]` in lines `[..., head_dim / 2, 64]`: 4 dimensions of a block's 16 tokens."""
    blocks = codes.unflatten(-1, (-1, 4)).unflatten(-3, (2, BLOCK))
    return blocks.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def _keys_of_lines(lines: Tensor, head_dim: int) -> Tensor:
    blocks = lines.unflatten(-1, (BLOCK, 4)).unflatten(-3, (2, head_dim // 4))
    return blocks.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def _value_lines(codes: Tensor) -> Tensor:
    """Return codes `[..., 32, head_dim]` in lines `[..., head_dim / 2, 64]`.

    A line has 16 dimensions of tokens 2i, 16 + 2i, 2i + 1 and 17 + 2i.
    """
    parts = codes.unflatten(-1, (-1, BLOCK)).unflatten(-3, (2, 8, 2))  # block, i, odd, dimension / 16, dimension
    return parts.movedim((-2, -4, -1, -3, -5), (-5, -4, -3, -2, -1)).flatten(-3).flatten(-3, -2)


def _values_of_lines(lines: Tensor, head_dim: int) -> Tensor:
    parts = lines.unflatten(-1, (BLOCK, 2, 2)).unflatten(-4, (head_dim // BLOCK, 8))
    return parts.movedim((-5, -4, -3, -2, -1), (-2, -4, -1, -3, -5)).flatten(-2).flatten(-4, -2)
