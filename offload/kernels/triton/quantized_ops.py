"""The kernels of quantized.py as torch operations: they have a launch each, and FakeTensorMode knows their shapes."""

from typing import Any

import torch
from torch import Tensor

from ..device_weight import DeviceWeight
from .ops import library, register

_OUTPUTS_A_PROGRAM = 64
_LEAST_ROWS = 16  # of a matrix unit
_PROGRAMS_A_PROCESSOR = 8  # whose loads together hide the latency of memory
_LEAST_GROUPS = 8  # of a split: fewer are not worth the sums that are added afterwards
_OUTPUTS_TO_ADD = 256

_WEIGHT = "Tensor codes, Tensor scales, Tensor? high, Tensor? minima, Tensor? factors, Tensor? minimum_factors,"
_WEIGHT += " Tensor? levels, int bits, int first"
library.define(f"quantized_product(Tensor x, {_WEIGHT}, Tensor? bias, Tensor(a!) y, bool add, int splits) -> ()")
library.define("add_splits(Tensor sums, Tensor? bias, Tensor(a!) y, bool add) -> ()")
library.define(f"dequantize({_WEIGHT}, Tensor? ids, int start, Tensor(a!) y) -> ()")

Operands = tuple[Any, ...]  # tensors of a weight, its bits and its first level


def product(x: Tensor, weight: DeviceWeight, bias: Tensor | None, y: Tensor, add: bool) -> None:
    """Write x W^T + bias to `y`, or add it to what is there.

    x `[rows, inputs]` and y `[rows, outputs]` may be parts of longer rows, of contiguous numbers; bias `[outputs]`.
    One launch, or two where the inputs are divided among programs.
    """
    outputs, splits = weight.shape[0], _useful_splits(x.device, weight)
    if splits == 1:
        torch.ops.triforce.quantized_product(x, *_operands(weight), bias, y, add, 1)
        return
    apart = -(-outputs // 16) * 16  # whose multiples the compiler takes for aligned, however many rows there are
    sums = torch.empty((splits, len(x), apart), dtype=torch.float32, device=x.device)
    torch.ops.triforce.quantized_product(x, *_operands(weight), None, sums, False, splits)
    torch.ops.triforce.add_splits(sums, bias, y, add)


def dequantize(weight: DeviceWeight, start: int, y: Tensor) -> Tensor:
    """Write the weights of outputs from `start` on to `y` `[n, inputs]`, and return it."""
    torch.ops.triforce.dequantize(*_operands(weight), None, start, y)
    return y


def dequantize_rows(weight: DeviceWeight, ids: Tensor, y: Tensor) -> Tensor:
    """Write the weights of the outputs `ids` `[n]` to `y` `[n, inputs]`, and return it."""
    torch.ops.triforce.dequantize(*_operands(weight), ids, 0, y)
    return y


def _operands(weight: DeviceWeight) -> Operands:
    tensors = (weight.codes, weight.scales, weight.high, weight.minima, weight.factors, weight.minimum_factors)
    return (*tensors, weight.levels, weight.format.bits, weight.format.levels[0] if weight.format.levels else 0)


def _useful_splits(device: torch.device, weight: DeviceWeight) -> int:
    """Return into how many parts to divide the inputs, so that each processor of the GPU has work.

    Rows do not count, so that a row's result depends on nothing but itself.
    """
    outputs, inputs = weight.shape
    groups = inputs // 32
    if device.type != "cuda":
        return min(2, groups)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = _PROGRAMS_A_PROCESSOR * processors // -(-outputs // _OUTPUTS_A_PROGRAM)
    return max(1, min(wanted, groups // _LEAST_GROUPS))


def _pointers(operands: Operands) -> tuple[Tensor, ...]:
    """Return a weight's tensors as the kernels take them; in place of absent ones, which are not read, the codes."""
    codes, scales, high, *rest = (operands[0] if x is None else x for x in operands[:7])
    return (codes, high, scales, *rest)


def _options(operands: Operands) -> dict[str, Any]:
    codes, scales, _, minima, factors, _, levels, bits, first = operands
    return {
        "BITS": bits,
        "FIRST": first,
        "HAS_TABLE": levels is not None,
        "NESTED": factors is not None,
        "IS_FLOAT": bits == 8 and first == 0,
        "HALVES": len(scales) == 2 * len(codes),
        "WIDE": max(1, len(codes) // len(scales)),
        "HAS_MINIMUM": minima is not None,
    }


def _quantized_product(x: Tensor, *call: Any) -> None:
    from . import quantized

    *operands, bias, y, add, splits = call
    rows, groups, outputs = len(x), len(operands[0]), operands[0].shape[1]
    block = min(64, max(_LEAST_ROWS, 1 << (rows - 1).bit_length()))
    grid = (-(-outputs // _OUTPUTS_A_PROGRAM), -(-rows // block), splits)
    quantized.product_kernel[grid](
        x, *_pointers(operands), y if bias is None else bias, y,
        rows, outputs, groups, -(-groups // splits), x.stride(0), y.stride(-2), y.stride(0) if splits > 1 else 0,
        **_options(operands), HAS_BIAS=bias is not None, ADD=add, WIDEN=x.device.type == "cpu",
        BLOCK_N=_OUTPUTS_A_PROGRAM, BLOCK_M=block, num_stages=3,
    )  # fmt: skip


def _add_splits(sums: Tensor, bias: Tensor | None, y: Tensor, add: bool) -> None:
    from . import quantized

    splits, (rows, outputs) = len(sums), y.shape
    quantized.add_splits_kernel[(-(-outputs // _OUTPUTS_TO_ADD), rows)](
        sums, y if bias is None else bias, y, splits, outputs, sums.stride(0), sums.stride(1), y.stride(0),
        HAS_BIAS=bias is not None, ADD=add, BLOCK_N=_OUTPUTS_TO_ADD,
    )  # fmt: skip


def _dequantize(*call: Any) -> None:
    from . import quantized

    *operands, ids, start, y = call
    quantized.dequantize_kernel[(-(-len(y) // _OUTPUTS_A_PROGRAM), len(operands[0]))](
        *_pointers(operands), operands[0] if ids is None else ids, y,
        start, len(y), operands[0].shape[1], y.stride(0),
        **_options(operands), HAS_IDS=ids is not None, BLOCK_N=_OUTPUTS_A_PROGRAM,
    )  # fmt: skip


register(quantized_product=_quantized_product, add_splits=_add_splits, dequantize=_dequantize)
