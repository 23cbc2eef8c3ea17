"""The operations of a decoder layer by the native kernel. Their contract is in offload/kernels/ops.py."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...architecture.config import ModelShape
from ...architecture.dims import LinearAttention
from ..quantized import Quantized, QuantizedFormat, QuantizedTensor, neighbours
from .checks import FLOATS, address, require
from .kernel import Kernel, check_panels
from .layout import pack_weight, unpack_weight, weight_rows
from .panels import format_struct, pack_quantized, unpack_quantized
from .structs import BLOCK, MAX_HEAD_DIM, Format, Linears, Product


class NativeOperations:
    """Operations by the native kernel. A result is valid until the same thread calls the same operation again.

    Each operation reuses the memory of its last result, so that decoding a token allocates nothing.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._local = threading.local()

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        return NativeLinear(self, [Panels(pack_weight(weight), len(weight))], bias)

    def serves_quantized(self, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16

    def quantized_linear(self, weights: Sequence[Quantized | Tensor], bias: Tensor | None = None) -> NativeLinear:
        return NativeLinear(self, list(_pack(self.kernel, weights)), bias)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return self.kernel.norm(x, weight, epsilon, self.buffer("norm", x.shape, x.dtype))

    def norm_heads(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return self.kernel.norm(x, weight, epsilon, torch.empty(x.shape, dtype=x.dtype))

    def gated(self, x: Tensor) -> Tensor:
        return self.kernel.gate(x, self.buffer("gated", (len(x), x.shape[1] // 2), x.dtype))

    def buffer(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return this thread's output buffer `name`, uninitialised."""
        buffers = self._local.__dict__
        buffer = buffers.get(name)
        if buffer is None or buffer.shape != size or buffer.dtype != dtype:
            with torch.inference_mode(False):  # an inference tensor could not be used outside that mode
                buffer = buffers[name] = torch.empty(size, dtype=dtype)
        return buffer


class Panels(NamedTuple):
    """Some outputs of a linear as the kernel reads them; `format` is None for a weight that is not quantised."""

    weight: Tensor
    outputs: int
    format: Format | None = None
    inputs: int = 0
    kind: QuantizedFormat | None = None  # of which `format` is

    def unpacked(self) -> QuantizedTensor | Tensor:
        """Return the weight `[out, in]` as it was before packing."""
        if self.kind is None:
            return unpack_weight(self.weight, self.outputs)
        return unpack_quantized(self.weight, self.kind, self.outputs)


class NativeLinear:
    """A linear whose weight is stored in panels; the original weight is not referenced.

    Its outputs may be in several parts, of which some are quantised and in different formats.
    """

    def __init__(self, operations: NativeOperations, parts: Sequence[Panels], bias: Tensor | None) -> None:
        self._operations = operations
        self._parts = tuple(parts)
        self.outputs = sum(part.outputs for part in parts)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        if onto is not None:
            return self._write(x, onto, True)
        return self._write(x, self._operations.buffer(f"{self.outputs}", (x.shape[0], self.outputs), x.dtype))

    def wide(self, x: Tensor) -> Tensor:
        return self._write(x, torch.empty((x.shape[0], self.outputs), dtype=torch.float32))

    def into(self, x: Tensor, y: Tensor) -> None:
        self._write(x, y)

    def _write(self, x: Tensor, y: Tensor, add: bool = False) -> Tensor:
        self.check(x)
        (rows, _), (stride, step), (written, outputs), wide = x.shape, y.stride(), y.shape, y.dtype == torch.float32
        is_right = written == rows and outputs == self.outputs and y.is_cpu and (wide or y.dtype == x.dtype)
        require(is_right, "y has other rows or outputs, or neither the dtype of x nor fp32")
        require(step == 1 and (stride >= outputs or rows < 2), "rows of y are not contiguous or overlap")
        require(not add or y.dtype == x.dtype, "what is added to has another dtype than x")
        self._operations.kernel.linears(self.call, x.data_ptr(), y.data_ptr(), rows, stride, add, wide)
        return y

    def check(self, x: Tensor) -> None:
        """Raise InvalidCall if these are no rows that the linear multiplies."""
        inputs, dtype = self.sizes
        is_right = x.dim() == 2 and x.shape[1] == inputs and x.dtype == dtype and x.is_contiguous() and x.is_cpu
        require(is_right, "x is not contiguous rows of the linear's inputs, in bf16, or fp32 beside plain weights")

    @cached_property
    def sizes(self) -> tuple[int, torch.dtype]:
        """Inputs, and the dtype of the rows."""
        weight, _, format, inputs, _ = self._parts[0]
        if format is not None:
            return inputs, torch.bfloat16
        return weight.numel() // (len(weight) * BLOCK), weight.dtype

    @cached_property
    def linears(self) -> Linears:
        """The linear as the kernel takes it."""
        inputs, dtype = self.sizes
        parts, end = (Product * len(self._parts))(), 0
        for call, (weight, outputs, format, *_) in zip(parts, self._parts, strict=True):
            check_panels(weight, inputs, outputs, dtype if format is None else format)
            bias = None if self._bias is None else self._bias[end:]
            end += outputs
            call.weight, call.bias, call.inputs, call.outputs = weight.data_ptr(), address(bias), inputs, outputs
            call.wide, call.format = dtype == torch.float32, None if format is None else ctypes.addressof(format)
        return Linears(parts, self.outputs, len(parts))

    @cached_property
    def call(self) -> int:
        """The address of `linears`."""
        return ctypes.addressof(self.linears)

    @property
    def formats(self) -> tuple[bytes, ...]:
        return tuple(b"" if part.format is None else bytes(part.format) for part in self._parts)

    def rows(self, ids: Tensor) -> Tensor:
        ((weight, _, format, inputs, _),) = self._parts
        if format is None:
            return weight_rows(weight, ids)
        return self._operations.kernel.unpack(
            weight, format, ids, torch.empty((len(ids), inputs), dtype=torch.bfloat16)
        )

    def tensors(self) -> list[Tensor]:
        return [part.weight for part in self._parts] + ([] if self._bias is None else [self._bias])

    def unpacked(self) -> tuple[list[QuantizedTensor | Tensor], Tensor | None]:
        """Return the weights whose outputs are concatenated, as they were before packing, and the bias in fp32.

        They are on the device of `tensors()`, which may be another one than the CPU.
        """
        return [part.unpacked() for part in self._parts], self._bias

    def over(self, tensors: list[Tensor]) -> NativeLinear:
        other = NativeLinear(self._operations, self._parts, self._bias)
        other._parts = tuple(part._replace(weight=x) for part, x in zip(self._parts, tensors, strict=False))
        other._bias = None if self._bias is None else tensors[-1]
        return other


def _pack(kernel: Kernel, weights: Sequence[Quantized | Tensor]) -> Iterator[Panels]:
    """Yield the panels of weights whose outputs are concatenated; neighbours of one format that fill panels are one."""
    for part in neighbours(weights, lambda before, w: before.format == w.format and before.shape[0] % BLOCK == 0):
        if isinstance(part, Tensor):
            yield Panels(pack_weight(part), len(part))
        else:
            outputs, (kind, inputs) = sum(weight.shape[0] for weight in part), (part[0].format, part[0].shape[1])
            yield Panels(pack_quantized(kernel, part), outputs, format_struct(kind), inputs, kind)


def why_not(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernel does not support a model of this shape; None if it does."""
    if device.type != "cpu":
        return f"the model runs on {device.type}"
    if dtype not in FLOATS:
        return f"it does not support {str(dtype).removeprefix('torch.')}"
    for head_dim in sorted({shape.heads_of(spec).head_dim for spec in shape.specs}):
        if head_dim % BLOCK or head_dim > MAX_HEAD_DIM:
            return f"it does not support heads of {head_dim}"
    if shape.linear is not None and (reason := _why_not_linear(shape.linear)) is not None:
        return reason
    widths = [shape.hidden, *shape.mlp_widths, *([shape.layer_input] if shape.layer_input else [])]
    if sizes := shape.latent:
        widths += [sizes.query_rank, sizes.rank, sizes.plain, sizes.value_dim]
    if any(width % BLOCK for width in widths):
        return f"it needs rows in multiples of {BLOCK}, not {' and '.join(map(str, widths))}"
    return None


def _why_not_linear(linear: LinearAttention) -> str | None:
    heads = linear.key_dim, linear.value_dim
    if any(head % BLOCK or head > MAX_HEAD_DIM for head in heads):
        return f"it does not support linear attention with heads of {heads[0]} and {heads[1]}"
    return None
