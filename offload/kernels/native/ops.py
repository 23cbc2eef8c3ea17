"""A decoder layer's operations by the native kernel. See offload/kernels/ops.py for what each means."""

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
    """Operations whose results are good until the same operation is next called by the same thread.

    Each keeps the memory of its last result, so that decoding a token asks for none.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._local = threading.local()

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        return NativeLinear(self, weight, bias)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return self.kernel.norm(x, weight, epsilon, self.room("norm", x.shape, x.dtype))

    def gated(self, x: Tensor) -> Tensor:
        return self.kernel.gate(x, self.room("gated", (len(x), x.shape[1] // 2), x.dtype))

    def room(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """This thread's memory of that name, uninitialised."""
        rooms = self._local.__dict__
        room = rooms.get(name)
        if room is None or room.shape != size or room.dtype != dtype:
            with torch.inference_mode(False):  # else it could only be used in that mode
                room = rooms[name] = torch.empty(size, dtype=dtype)
        return room


class NativeLinear:
    """A linear whose weight lies in panels; the original is not kept."""

    def __init__(self, operations: NativeOperations, weight: Tensor, bias: Tensor | None) -> None:
        self._operations = operations
        self._outputs = len(weight)
        self._weight = pack_weight(weight)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        y = onto if onto is not None else self._operations.room(f"{self._outputs}", (len(x), self._outputs), x.dtype)
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
    """Why the kernel cannot serve a model of this shape; None if it can."""
    if device.type != "cpu":
        return f"the model runs on {device.type}"
    if dtype not in DTYPES:
        return f"it has no {str(dtype).removeprefix('torch.')}"
    if shape.head_dim % BLOCK or shape.head_dim > MAX_HEAD_DIM:
        return f"it has no heads of {shape.head_dim}"
    if shape.hidden % BLOCK or shape.intermediate % BLOCK:
        return f"it wants rows in multiples of {BLOCK}, not {shape.hidden} and {shape.intermediate}"
    return None
