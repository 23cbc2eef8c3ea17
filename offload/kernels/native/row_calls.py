"""The structs of calls over rows: norms, the gate, and quantised weights. See calls.py."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .checks import FLOATS, address, check, require
from .structs import BLOCK, GROUP_INPUTS, Format, Pack, Rows, Unpack


def pack_call(codes: Tensor, format: Format, weight: Tensor) -> Pack:
    """Return a call that stores the codes of a `QuantizedTensor` in the panels of `weight`."""
    rows, groups, width = codes.shape
    require(width in (16, 32) and codes.stride(2) == 1 and codes.itemsize == 1 and codes.is_cpu, "no codes of groups")
    require(width == 32 or format.bits == 4, "only codes of 4 bits are halves of bytes")
    check_panels(weight, GROUP_INPUTS * groups, rows, format)
    return Pack(
        codes=codes.data_ptr(),
        row_stride=codes.stride(0),
        group_stride=codes.stride(1),
        halves=width == 16,
        format=ctypes.addressof(format),
        weight=weight.data_ptr(),
        rows=rows,
        inputs=GROUP_INPUTS * groups,
    )


def unpack_call(weight: Tensor, format: Format, ids: Tensor, y: Tensor) -> Unpack:
    """Return a call that dequantises rows `ids` `[rows]` of a packed weight to `y` `[rows, inputs]`."""
    rows, inputs = y.shape
    check("y", y, (rows, inputs), *FLOATS)
    check("ids", ids, (rows,), torch.int64)
    check_panels(weight, inputs, 0, format)
    if rows:
        least, most = (int(x) for x in ids.aminmax())
        require(least >= 0 and most < len(weight) * BLOCK, "there is no such row of the weight")
    return Unpack(
        weight=weight.data_ptr(),
        format=ctypes.addressof(format),
        ids=ids.data_ptr(),
        y=y.data_ptr(),
        rows=rows,
        inputs=inputs,
        wide=y.dtype == torch.float32,
    )


def rows_call(x: Tensor, y: Tensor, weight: Tensor | None = None, epsilon: float = 0.0) -> Rows:
    """Return a call that writes the RMSNorm of `x`, or without a weight its gate, to `y` `[..., width]`, contiguous.

    For a norm x may be `[tokens, heads, width]` with any stride between tokens.
    """
    *_, heads, width = y.shape
    has_heads = y.dim() == 3
    require(width % BLOCK == 0, f"rows of {width} are no multiple of {BLOCK}")
    check("y", y, y.shape, *FLOATS)
    size = y.shape if weight is not None else (*y.shape[:-1], 2 * width)
    require(x.shape == size and x.dtype == y.dtype and x.is_cpu, "x is no match for y")
    require(x.is_contiguous() if not has_heads else x.stride()[1:] == (x.shape[2], 1), "rows of x are not contiguous")
    if weight is not None:
        check("weight", weight, (width,), x.dtype)
    return Rows(
        x=x.data_ptr(),
        weight=address(weight),
        y=y.data_ptr(),
        rows=y.numel() // width,
        width=width,
        heads=heads if has_heads else 1,
        stride=x.stride(0) if has_heads else width,
        epsilon=epsilon,
        wide=x.dtype == torch.float32,
    )


def check_panels(weight: Tensor, inputs: int, outputs: int, kind: torch.dtype | Format) -> None:
    """Raise InvalidCall if a packed weight of a dtype or format is not that of so many inputs, and at least outputs."""
    size, dtype = weight.shape, weight.dtype
    if isinstance(kind, Format):
        block, bytes_ = kind.block()
        is_one = dtype == torch.uint8 and len(size) == 3 and size[1] * block == inputs and size[2] == bytes_
    else:
        is_one = dtype == kind and inputs % 2 == 0 and weight.numel() == size[0] * BLOCK * inputs
    require(is_one and weight.is_contiguous() and weight.is_cpu, "no panels of that many inputs")
    require(size[0] * BLOCK >= outputs, "the weight has fewer outputs")
