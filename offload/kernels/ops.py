"""The operations of a decoder layer, by torch or by the native kernel, and the choice between the two."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..architecture.config import ModelShape
from ..errors import SettingsError
from . import triton
from .linear import TorchLinear
from .native import Kernel, KernelUnavailable, find_kernel
from .quantized import Quantized
from .quantized_linear import QuantizedLinear
from .triton import row_ops


class Linear(Protocol):
    """`y = x W^T + b` with W `[out, in]`, prepared for this machine; x is `[tokens, in]`."""

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return y `[tokens, out]`; `onto`, the residual `[tokens, out]`, is added and may be overwritten with y."""

    def wide(self, x: Tensor) -> Tensor:
        """Return y `[tokens, out]` in fp32, in a newly allocated tensor."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of W, `[len(ids), in]`, for an embedding that shares its table with the output head."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors that hold the weight and the bias."""

    def over(self, tensors: list[Tensor]) -> Linear:
        """Return this linear over other memory, `tensors` like those of `tensors()`; the caller copies the values."""


class LocalLinear(Linear, Protocol):
    """A linear, or a rank's part of one, whose result needs no other rank."""

    @property
    def outputs(self) -> int:
        """Return the number of outputs."""

    @property
    def formats(self) -> tuple[Hashable, ...]:
        """Return how its parts are quantised; linears of equal formats and sizes of `tensors` can be over the same."""

    def into(self, x: Tensor, y: Tensor) -> None:
        """Write y `[tokens, out]`, in the dtype of x or in fp32."""

    def over(self, tensors: list[Tensor]) -> LocalLinear:
        """Return this linear over other memory; see `Linear.over`."""


class Operations(Protocol):
    """The operations of a layer. A result may be overwritten by the next call of the same operation."""

    @property
    def kernel(self) -> Kernel | None:
        """Return the native kernel; None where torch computes."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> LocalLinear:
        """Return a linear with a weight `[out, in]` and bias `[out]`; the caller must not use the weight afterwards."""

    def serves_quantized(self, dtype: torch.dtype) -> bool:
        """Return whether weights of a model that computes in `dtype` stay quantised."""

    def quantized_linear(self, weights: Sequence[Quantized | Tensor], bias: Tensor | None = None) -> LocalLinear:
        """Return a linear as `linear`; the outputs of the weights `[out, in]`, quantised or not, are concatenated."""

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return the RMSNorm of rows `[tokens, width]`."""

    def norm_heads(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return the RMSNorm of each head of `x` `[tokens, heads, head_dim]`; any stride between tokens."""

    def gated(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up, `[tokens, width]`, of rows `[tokens, gate and up]`."""


class TorchOperations:
    """Operations by torch, for every device; the tests' reference for the native ones."""

    kernel: Kernel | None = None

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> TorchLinear:
        return TorchLinear(weight, bias)

    def serves_quantized(self, dtype: torch.dtype) -> bool:
        return False

    def quantized_linear(self, weights: Sequence[Quantized | Tensor], bias: Tensor | None = None) -> LocalLinear:
        raise NotImplementedError("torch multiplies with dequantised weights")

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, epsilon)

    def norm_heads(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, epsilon)

    def gated(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class CudaOperations(TorchOperations):
    """Operations by Triton on a GPU, without it by torch; bf16 models' quantised weights stay quantised."""

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return row_ops.rms_norm(x, weight, epsilon) if triton.serves_rows(x) else super().norm(x, weight, epsilon)

    def norm_heads(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return self.norm(x, weight, epsilon)

    def gated(self, x: Tensor) -> Tensor:
        return row_ops.gated(x) if triton.serves_rows(x) else super().gated(x)

    def serves_quantized(self, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16

    def quantized_linear(self, weights: Sequence[Quantized | Tensor], bias: Tensor | None = None) -> QuantizedLinear:
        return QuantizedLinear(weights, bias)


def choose_operations(kernel: str, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Operations:
    """Return the native kernel's operations if it supports the model, torch's otherwise.

    Args:
        kernel: "auto", "off", or the instruction set level that is required.

    Raises:
        SettingsError: the required level is not available, or does not support the model; the message says why.
    """
    from .native.ops import NativeOperations, why_not

    if kernel == "off":
        return TorchOperations()
    try:
        reason = why_not(shape, dtype, device)
        if reason is None:
            return NativeOperations(find_kernel(kernel))
    except KernelUnavailable as error:
        reason = str(error)
    if kernel != "auto":
        raise _refusal(reason)
    return CudaOperations() if device.type == "cuda" else TorchOperations()


def check_kernel(kernel: str) -> None:
    """Raise SettingsError for a level that this machine lacks, whatever the model; "auto" and "off" are not checked."""
    if kernel in ("auto", "off"):
        return
    try:
        find_kernel(kernel)
    except KernelUnavailable as error:
        raise _refusal(str(error)) from error


def _refusal(reason: str) -> SettingsError:
    return SettingsError(f"the native kernel cannot be used: {reason}", "use --kernel auto; see triforce doctor")
