"""Quantises keys and values, and back, by torch's operations on any device: the native kernel's groups (see types.h).

The numbers and their layout are those of kernels/native/kv_groups.h: scales and middles for each channel of keys and
for each token of values (KIVI, arXiv 2402.02750), in groups of 32 tokens.
"""

import torch
from torch import Tensor

from ..architecture.kv_formats import BLOCK, GROUP

_SMALLEST = 2.0**-126  # a scale below it has no inverse
_LINE = 64  # codes


def quantize_groups(keys: Tensor, values: Tensor) -> Tensor:
    """Return groups `[..., bytes]`, uint8, of keys and values `[..., 32, head_dim]`."""
    (key_scales, key_middles, key_codes), (value_scales, value_middles, value_codes) = (
        _quantized(x.float(), dim) for x, dim in ((keys, -2), (values, -1))
    )
    numbers = torch.cat([x.flatten(-2) for x in (key_scales, key_middles, value_scales, value_middles)], dim=-1)
    lines = (x.flatten(-2) for x in (_key_lines(key_codes), _value_lines(value_codes)))
    return torch.cat((numbers.bfloat16().view(torch.uint8), *lines), dim=-1)


def dequantize_groups(groups: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values `[..., 32, head_dim]` of groups `[..., bytes]`."""
    numbers, codes = _parts(groups, head_dim)
    scales, middles = numbers[..., 2 * head_dim :].unsqueeze(-1).chunk(2, dim=-2)
    values = _values_of_lines(codes[1], head_dim).float().mul_(scales).add_(middles)
    return dequantize_keys(groups, head_dim).to(dtype), values.to(dtype)


def dequantize_keys(groups: Tensor, head_dim: int) -> Tensor:
    """Return keys `[..., 32, head_dim]` in fp32 of groups `[..., bytes]`."""
    numbers, codes = _parts(groups, head_dim)
    scales, middles = numbers[..., : 2 * head_dim].unsqueeze(-2).chunk(2, dim=-1)
    return _keys_of_lines(codes[0], head_dim).float().mul_(scales).add_(middles)


def _parts(groups: Tensor, head_dim: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return scales and middles of groups in fp32, and the lines of codes of keys and of values, int8."""
    header = 4 * head_dim + 4 * GROUP
    keys, values = groups[..., header:].view(torch.int8).unflatten(-1, (-1, _LINE)).chunk(2, dim=-2)
    return groups[..., :header].view(torch.bfloat16).float(), (keys, values)


def _quantized(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales, middles and codes (uint8) of fp32 numbers that share a scale along `dim`, which stays as 1.

    bf16 represents both, and no number is clamped. Both are NaN if one of the numbers is not finite.
    """
    least, most = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    share = 128 / 255
    middle = (least + (most * share - least * share)).bfloat16().float()
    scale = torch.maximum((most - middle) / 127, (middle - least) / 128)
    scale = ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)  # the bf16 above it, or its own
    is_finite = least.isfinite() & most.isfinite()
    has_codes = is_finite & (scale >= _SMALLEST)  # else the numbers are equal, too close, or not finite
    inverse = torch.where(has_codes, 1 / scale, 0.0)
    steps = torch.where(has_codes, (x - middle) * inverse, 0.0)
    codes = steps.clamp_(-128, 127).round_().to(torch.int8).view(torch.uint8)
    scale, middle = (torch.where(is_finite, number, torch.nan) for number in (scale, middle))
    return scale, middle, codes


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
