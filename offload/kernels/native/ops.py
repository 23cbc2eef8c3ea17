"""The operations of a decoder layer by the native kernel. Their contract is in offload/kernels/ops.py."""

from __future__ import annotations

import copy
import threading

import torch
from torch import Tensor

from ...architecture.config import ModelShape
from .kernel import DTYPES, Kernel
from .layout import pack_weight, weight_rows
from .library import BLOCK, MAX_HEAD_DIM


class NativeOperations:
    """Operations by the native kernel. A result is valid until the same thread calls the same operation again.

    Each operation reuses the memory of its last result, so that decoding a token allocates nothing.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._local = threading.local()

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        return NativeLinear(self, weight, bias)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return self.kernel.norm(x, weight, epsilon, self.buffer("norm", x.shape, x.dtype))

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


class NativeLinear:
    """A linear whose weight is stored in panels; the original weight is not referenced."""

    def __init__(self, operations: NativeOperations, weight: Tensor, bias: Tensor | None) -> None:
        self._operations = operations
        self._outputs = len(weight)
        self._weight = pack_weight(weight)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        y = onto if onto is not None else self._operations.buffer(f"{self._outputs}", (len(x), self._outputs), x.dtype)
        return self._operations.kernel.linear(x, self._weight, self._bias, onto, y)

    def wide(self, x: Tensor) -> Tensor:
        y = torch.empty((len(x), self._outputs), dtype=torch.float32)
        return self._operations.kernel.linear(x, self._weight, self._bias, None, y)

    def rows(self, ids: Tensor) -> Tensor:
        return weight_rows(self._weight, ids)

    def tensors(self) -> list[Tensor]:
        return [self._weight] if self._bias is None else [self._weight, self._bias]

    def over(self, tensors: list[Tensor]) -> NativeLinear:
        other = copy.copy(self)
        other._weight, other._bias = tensors if len(tensors) == 2 else (tensors[0], None)
        return other


def why_not(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernel does not support a model of this shape; None if it does."""
    if device.type != "cpu":
        return f"the model runs on {device.type}"
    if dtype not in DTYPES:
        return f"it does not support {str(dtype).removeprefix('torch.')}"
    if shape.head_dim % BLOCK or shape.head_dim > MAX_HEAD_DIM:
        return f"it does not support heads of {shape.head_dim}"
    if shape.hidden % BLOCK or shape.intermediate % BLOCK:
        return f"it needs rows in multiples of {BLOCK}, not {shape.hidden} and {shape.intermediate}"
    return None
