"""Splits the blocks of quantised GGUF tensors into codes, scales and minima, without changing a value.

The native kernel reads the blocks itself; codes apart are for GPUs and for parts of rows.

Layouts: ggml's block structs (ggml-common.h), as the gguf package dequantises them.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...architecture.weight_formats import FORMATS, QuantizedFormat
from ...kernels.quantized import Quantized, QuantizedTensor, StoredBlocks
from .gguf_file import BLOCK_BYTES


def stored_matrix(name: str, data: Tensor) -> Quantized:
    """Return the matrix whose blocks are the rows `[rows, bytes]` of `data`, uint8; `name` is one of `FORMATS`."""
    kind, split = FORMATS[name], _SPLITTERS[name]

    def splitter(blocks: Tensor) -> QuantizedTensor:
        return split(kind, blocks.view(len(blocks), -1, BLOCK_BYTES[name]))

    if name == "MXFP4":  # its scales decide the format
        return splitter(data)
    return StoredBlocks(kind, data, data.shape[1] // BLOCK_BYTES[name] * kind.block, splitter)


def _halves(data: Tensor) -> Tensor:
    """Return a view of fp16 numbers, from their bytes `[rows, blocks, 2]`; all blocks have even sizes."""
    return data.view(torch.float16).squeeze(-1)


def _nibbles(data: Tensor) -> Tensor:
    """Return the low four bits of bytes `[..., n]`, and then the high four: `[..., 2 n]`."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _fifth_bits(data: Tensor) -> Tensor:
    """Return bit i of 32-bit numbers, from their bytes `[rows, blocks, 4]`, as code bits `[rows, blocks, 32]`."""
    bits = data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


def _split_plain(kind: QuantizedFormat, blocks: Tensor) -> QuantizedTensor:
    """Split Q4_0, Q4_1, Q5_0, Q5_1 and IQ4_NL: scale, minimum, fifth bits, low bits."""
    scales, blocks = _halves(blocks[..., :2]), blocks[..., 2:]
    minima = None
    if kind.has_minimum:
        minima, blocks = _halves(blocks[..., :2]), blocks[..., 2:]
    codes = blocks if kind.bits == 4 else _nibbles(blocks[..., 4:]) | _fifth_bits(blocks[..., :4])
    return QuantizedTensor(kind, codes, scales, minima)


def _split_bytes(kind: QuantizedFormat, blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(kind, blocks[..., 2:].view(torch.int8), _halves(blocks[..., :2]))


def _split_nested(kind: QuantizedFormat, blocks: Tensor) -> QuantizedTensor:
    """Split Q4_K and Q5_K: two factors, 8 scales and 8 minima of 6 bits in 12 bytes, fifth bits, low bits."""
    low, high, both = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat((low & 63, both & 15 | low >> 2 & 48), dim=-1)
    minima = torch.cat((high & 63, both >> 4 | high >> 2 & 48), dim=-1)
    codes = _nibbles(blocks[..., -128:].unflatten(-1, (4, 32))).flatten(-2)
    if kind.bits == 5:
        fifth = blocks[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1) & 1
        codes = codes | fifth.flatten(-2) << 4
    return QuantizedTensor(
        kind,
        codes.flatten(1).unflatten(1, (-1, 32)),
        scales.flatten(1).view(torch.int8),
        minima.flatten(1).view(torch.int8),
        _halves(blocks[..., :2]),
        -_halves(blocks[..., 2:4]),  # ggml subtracts its minima
    )


def _split_six(kind: QuantizedFormat, blocks: Tensor) -> QuantizedTensor:
    """Split Q6_K: low four bits, high two bits, 16 scales of 8 bits, the factor."""
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3
    codes = low | high.flatten(-3) << 4
    scales = blocks[..., 192:208].flatten(1).view(torch.int8)
    return QuantizedTensor(kind, codes.flatten(1).unflatten(1, (-1, 32)), scales, None, _halves(blocks[..., 208:210]))


def _split_uneven(kind: QuantizedFormat, blocks: Tensor) -> QuantizedTensor:
    """Split IQ4_XS: the factor, high two and low four bits of 8 scales less 32, the codes."""
    pairs, fours = torch.arange(0, 8, 2, dtype=torch.uint8), torch.tensor([0, 4], dtype=torch.uint8)
    high = (blocks[..., 2:4].unsqueeze(-1) >> pairs & 3).flatten(-2)
    low = (blocks[..., 4:8].unsqueeze(-1) >> fours & 15).flatten(-2)
    scales = (low | high << 4).view(torch.int8) - 32
    return QuantizedTensor(
        kind, blocks[..., 8:].flatten(1).unflatten(1, (-1, 16)), scales.flatten(1), None, _halves(blocks[..., :2])
    )


def _split_powers(kind: QuantizedFormat, blocks: Tensor) -> QuantizedTensor:
    """Split MXFP4: the exponent of the scale, the codes."""
    return with_powers(kind, blocks[..., 1:], blocks[..., 0])


def with_powers(kind: QuantizedFormat, codes: Tensor, exponents: Tensor) -> QuantizedTensor:
    """Return an MXFP4 matrix from its codes and the exponents of its scales, `[rows, groups]` uint8.

    Scales are wide if any is not an fp16 number, but for groups of zeros. Levels are twice e2m1's numbers, so a scale
    is 2^(exponent - 128).
    """
    is_zero = (codes & 0x77 == 0).all(-1)  # both nibbles, without their signs
    scales = torch.tensor([2.0 ** (exponent - 128) for exponent in range(256)])[exponents.int()].masked_fill(is_zero, 0)
    halves = scales.half()
    if torch.equal(halves.float(), scales):
        return QuantizedTensor(kind, codes, halves)
    return QuantizedTensor(replace(kind, wide=True), codes, scales)


_Splitter = Callable[[QuantizedFormat, Tensor], QuantizedTensor]
_SPLITTERS: dict[str, _Splitter] = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"), _split_plain),
    "Q8_0": _split_bytes,
    "MXFP4": _split_powers,
    "Q4_K": _split_nested,
    "Q5_K": _split_nested,
    "Q6_K": _split_six,
    "IQ4_XS": _split_uneven,
}
