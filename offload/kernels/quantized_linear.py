"""Linears whose weights stay quantised on a GPU: by Triton's kernels, or where it is missing by torch's operations.

A few rows are multiplied with the codes, because reading the weight takes longest. For more rows, some outputs at a
time are dequantised, and torch multiplies.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..architecture.footprint import DEQUANTIZED_BYTES
from ..architecture.weight_formats import QuantizedFormat
from . import triton
from .device_weight import DeviceWeight, pack_for_device
from .quantized import QuantizedTensor
from .triton import quantized_ops

_TORCH_BYTES = 24  # that torch's operations take for each weight while they dequantise it
_TILE_OUTPUTS = 16  # a tile has a multiple of them


class _Part(NamedTuple):
    """Some outputs of a linear: a quantised weight, or one `[outputs, inputs]` in floating point."""

    weight: DeviceWeight | Tensor

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    def tensors(self) -> list[Tensor]:
        return [self.weight] if isinstance(self.weight, Tensor) else self.weight.tensors()

    def over(self, tensors: Iterator[Tensor]) -> _Part:
        found = [next(tensors) for _ in self.tensors()]
        return _Part(found[0] if isinstance(self.weight, Tensor) else self.weight.over(found))


class QuantizedLinear:
    """A linear whose outputs are in parts, of which some are quantised; see `Linear` in ops.py. It computes in bf16."""

    def __init__(self, weights: Sequence[QuantizedTensor | Tensor], bias: Tensor | None = None) -> None:
        """Pack the weights `[outputs, inputs]` on the device where they are; the bias is `[outputs]` there."""
        self._parts = tuple(_Part(weight) for weight in _packed(weights))
        self.outputs = sum(part.outputs for part in self._parts)
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
        return tuple(None if isinstance(part.weight, Tensor) else part.weight.format for part in self._parts)

    def rows(self, ids: Tensor) -> Tensor:
        ((weight,),) = self._parts
        y = torch.empty((len(ids), weight.shape[1]), dtype=torch.bfloat16, device=ids.device)
        if not triton.serves_quantized(ids.device):
            return y.copy_(weight.unpacked(ids).dequantized())
        return quantized_ops.dequantize_rows(weight, ids, y)

    def tensors(self) -> list[Tensor]:
        found = [x for part in self._parts for x in part.tensors()]
        return found if self._bias is None else [*found, self._bias]

    def over(self, tensors: list[Tensor]) -> QuantizedLinear:
        other, given = copy.copy(self), iter(tensors)
        other._parts = tuple(part.over(given) for part in self._parts)
        other._bias = None if self._bias is None else next(given)
        return other

    def _write(self, x: Tensor, y: Tensor, add: bool) -> Tensor:
        """Write the product to `y`, or add it to what is there."""
        end = 0
        for part in self._parts:
            some = slice(end, end := end + part.outputs)
            _multiply(x, part.weight, None if self._bias is None else self._bias[some], y[:, some], add)
        return y


def _packed(weights: Sequence[QuantizedTensor | Tensor]) -> Iterator[DeviceWeight | Tensor]:
    """Yield the weights as they lie in memory; neighbours of one format are one."""
    rest = list(weights)
    while rest:
        joined = [rest.pop(0)]
        if isinstance(joined[0], Tensor):
            yield joined[0]
            continue
        while rest and not isinstance(rest[0], Tensor) and rest[0].format == joined[0].format:
            joined.append(rest.pop(0))
        yield pack_for_device(joined)


def _multiply(x: Tensor, weight: DeviceWeight | Tensor, bias: Tensor | None, y: Tensor, add: bool) -> None:
    if isinstance(weight, Tensor):
        _multiply_plain(x, weight, bias, y, add)
    elif len(x) > triton.ROWS:
        _multiply_tiles(x, weight, bias, y, add)
    elif triton.serves_quantized(x.device):
        quantized_ops.product(x, weight, bias, y, add)
    else:
        for some, tile in _tiles(weight, torch.float32):
            _multiply_wide(x, tile, None if bias is None else bias[some], y[:, some], add)


def _multiply_tiles(x: Tensor, weight: DeviceWeight, bias: Tensor | None, y: Tensor, add: bool) -> None:
    """Multiply many rows: torch's products bound by arithmetic take longer than dequantising once."""
    for some, tile in _tiles(weight, x.dtype):
        _multiply_plain(x, tile, None if bias is None else bias[some], y[:, some], add)


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
            yield some, quantized_ops.dequantize(weight, start, scratch[: some.stop - start])


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
