"""From the integers of a layout to quantised or dequantised matrices."""

import torch
from torch import Tensor

from ....kernels.quantized import QuantizedTensor
from .stored import StoredMatrix, Values


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the codes in the bits of int32 numbers `[rows, n]`, the lowest first: uint8 `[rows, n * 32 / bits]`."""
    data = packed.contiguous().view(torch.uint8)
    return data if bits == 8 else torch.stack((data & 15, data >> 4), dim=-1).flatten(1)


def signed_codes(codes: Tensor, bits: int) -> Tensor:
    """Return unsigned codes as those of `Values`: with 8 bits the levels, int8."""
    return (codes ^ 128).view(torch.int8) if bits == 8 else codes


def levels_of(codes: Tensor, bits: int) -> Tensor:
    """Return the levels of unsigned codes, fp32."""
    return codes.float() - (1 << bits - 1)


def with_zeros(codes: Tensor, scales: Tensor, zeros: Tensor) -> Values:
    """Return the values, without zero points if they all are 0; `zeros` broadcast to the size of `scales`."""
    return Values(codes, scales.float(), zeros.expand_as(scales) if zeros.any() else None)


def quantized(matrix: StoredMatrix, values: Values) -> QuantizedTensor | None:
    """Return the matrix as the kernel takes it; None if scales belong to parts of its groups, or weights are NaN.

    A product `scale * zero` has no more than the 24 bits of fp32, unless the scale is an fp32 number itself.
    """
    kind = matrix.format(values.zeros is not None)
    if kind is None or (kind.is_float and bool((values.codes.view(torch.uint8) & 127 == 127).any())):
        return None
    count, each = matrix.size[1] // kind.group, matrix.group // kind.group
    minima = None if values.zeros is None else -values.scales * values.zeros
    scales, minima = (
        None if x is None else x.repeat_interleave(each, 1)[:, :count].contiguous() for x in (values.scales, minima)
    )
    return QuantizedTensor(kind, values.codes.unflatten(1, (-1, 32)), scales, minima)


def dequantized(matrix: StoredMatrix, values: Values) -> Tensor:
    """Return the weights `[rows, inputs]` in fp32."""
    levels = levels_of(values.codes, 4) if matrix.bits == 4 else values.codes.float()
    scales, zeros = (
        None if x is None else x.repeat_interleave(matrix.group, 1)[:, : matrix.size[1]]
        for x in (values.scales, values.zeros)
    )
    return (levels if zeros is None else levels - zeros) * scales
