"""Linears whose weights stay quantised on a GPU: by Triton's kernels, or where it is missing by torch's operations.

A few rows are multiplied with the codes, because reading the weight takes longest. For more rows, some outputs at a
time are dequantised, and torch multiplies.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..architecture.pages import DEQUANTIZED_BYTES
from ..architecture.weight_formats import QuantizedFormat
from . import triton
from .device_weight import DeviceWeight, pack_for_device
from .quantized import Quantized, neighbours
from .triton import row_ops

_TORCH_BYTES = 24  # that torch's operations take for each weight while they dequantise it
_TILE_OUTPUTS = 16  # a tile has a multiple of them


class QuantizedLinear:
    """A linear whose outputs are in parts, of which some are quantised; see `Linear` in ops.py. It computes in bf16."""

    def __init__(self, weights: Sequence[Quantized | Tensor], bias: Tensor | None = None) -> None:
        """Pack the weights `[outputs, inputs]` on the device where they are; the bias is `[outputs]` there."""
        alike = neighbours(weights, lambda before, weight: before.format == weight.format)
        self._weights: list[DeviceWeight | Tensor] = [
            part if isinstance(part, Tensor) else pack_for_device(part) for part in alike
        ]
        self.outputs = sum(weight.shape[0] for weight in self._weights)
        self._bias = bias

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        y = x.new_empty((len(x), self.outputs)) if onto is None else onto
        return self._write(x, y, onto is not None)

    def wide(self, x: Tensor) -> Tensor:
        return self._write(x, x.new_empty((len(x), self.outputs), dtype=torch.float32), False)

    def into(self, x: Tensor, y: Tensor) -> None:
        self._write(x, y, False)

    @property
    def formats(self) -> tuple[QuantizedFormat | None, ...]:
        return tuple(None if isinstance(weight, Tensor) else weight.format for weight in self._weights)

    def rows(self, ids: Tensor) -> Tensor:
        (weight,) = self._weights
        assert isinstance(weight, DeviceWeight)
        y = torch.empty((len(ids), weight.shape[1]), dtype=torch.bfloat16, device=ids.device)
        if not triton.serves_quantized(ids.device):
            return y.copy_(weight.unpacked(ids).dequantized())
        return row_ops.dequantize(weight, ids, y)

    def tensors(self) -> list[Tensor]:
        parts = [[weight] if isinstance(weight, Tensor) else weight.tensors() for weight in self._weights]
        return [x for part in parts for x in part] + ([] if self._bias is None else [self._bias])

    def over(self, tensors: list[Tensor]) -> QuantizedLinear:
        other, given = copy.copy(self), iter(tensors)
        other._weights = [
            next(given) if isinstance(weight, Tensor) else weight.over([next(given) for _ in weight.tensors()])
            for weight in self._weights
        ]
        other._bias = None if self._bias is None else next(given)
        return other

    def _write(self, x: Tensor, y: Tensor, add: bool) -> Tensor:
        """Write the product to `y`, or add it to what is there."""
        end = 0
        for weight in self._weights:
            some = slice(end, end := end + weight.shape[0])
            _multiply(x, weight, None if self._bias is None else self._bias[some], y[:, some], add)
        return y


def _multiply(x: Tensor, weight: DeviceWeight | Tensor, bias: Tensor | None, y: Tensor, add: bool) -> None:
    """Write x W^T + bias to `y`, or add it there."""
    is_few = len(x) <= triton.ROWS
    if isinstance(weight, Tensor):
        _multiply_plain(x, weight, bias, y, add)
    elif is_few and triton.serves_quantized(x.device):
        row_ops.product(x, weight, bias, y, add)
    else:  # many rows are bound by arithmetic, and torch's products take longer than dequantising once
        multiply = _multiply_wide if is_few else _multiply_plain
        for some, tile in _tiles(weight, torch.float32 if is_few else x.dtype):
            multiply(x, tile, None if bias is None else bias[some], y[:, some], add)


def _tiles(weight: DeviceWeight, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield some outputs and their dequantised weights, in memory that the next ones overwrite."""
    outputs, inputs = weight.shape
    by_triton = triton.serves_quantized(weight.codes.device)
    most = DEQUANTIZED_BYTES // (inputs * (dtype.itemsize if by_triton else _TORCH_BYTES))
    count = max(most // _TILE_OUTPUTS, 1) * _TILE_OUTPUTS
    scratch = weight.scales.new_empty((min(count, outputs), inputs), dtype=dtype) if by_triton else None
    for start in range(0, outputs, count):
        some = slice(start, min(start + count, outputs))
        if scratch is None:
            yield some, weight.unpacked(some).dequantized().to(dtype)
        else:
            yield some, row_ops.dequantize(weight, start, scratch[: some.stop - start])


def _multiply_plain(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, add: bool) -> None:
    """Write x W^T + bias to `y`, or add it there; in the dtype of x, but for what is added."""
    if y.dtype != x.dtype:
        y.copy_(x @ weight.T)
    elif add:
        y.addmm_(x, weight.T)
    else:
        torch.mm(x, weight.T, out=y)
    if bias is not None:
        y += bias


def _multiply_wide(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, add: bool) -> None:
    """Do what `_multiply_plain` does in fp32, and round once."""
    product = x.float() @ weight.T
    for other in ([] if bias is None else [bias]) + ([y] if add else []):
        product += other
    y.copy_(product)
