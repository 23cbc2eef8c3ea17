"""What a decoder layer is computed with on this machine: torch's operations, or the native kernel's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..architecture.config import ModelShape
from ..errors import SettingsError
from .linear import TorchLinear

if TYPE_CHECKING:
    from .native import Kernel


class Linear(Protocol):
    """`y = x W^T + b` with W `[out, in]`, prepared for this machine; x is `[tokens, in]`."""

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """`[tokens, out]`; `onto` is added, and may be overwritten with the result."""
        ...

    def wide(self, x: Tensor) -> Tensor:
        """The same in fp32, in memory of its own."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of W, `[len(ids), in]`: an embedding shares its table with the output head."""
        ...

    def tensors(self) -> list[Tensor]:
        """What it consists of."""
        ...

    def over(self, tensors: list[Tensor]) -> Linear:
        """The same linear in other memory, to which what it consists of is copied."""
        ...


class Operations(Protocol):
    """The parts of a layer. A result may be overwritten by the next call of the same operation."""

    kernel: Kernel | None  # the native kernel, if that is what computes

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Prepare a weight `[out, in]`, of which the caller keeps nothing."""
        ...

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """RMSNorm of rows `[tokens, width]`."""
        ...

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up of rows `[tokens, gate and up]`."""
        ...


class TorchOperations:
    """Library operations alone: every device, and the oracle of the native ones."""

    kernel = None

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> TorchLinear:
        return TorchLinear(weight, bias)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, epsilon)

    def gated(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


def choose_operations(kernel: str, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Operations:
    """The native kernel where it can serve, else torch.

    Args:
        kernel: "auto", "off", or a level that must be had.

    Raises:
        SettingsError: a level was asked for, and it cannot serve here; why is in the message.
    """
    from .native import KernelUnavailable, find_kernel
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
    return TorchOperations()


def check_kernel(kernel: str) -> None:
    """Raises SettingsError for a level that this machine lacks, whatever the model; "auto" and "off" cost nothing."""
    if kernel in ("auto", "off"):
        return
    from .native import KernelUnavailable, find_kernel

    try:
        find_kernel(kernel)
    except KernelUnavailable as error:
        raise _refusal(str(error)) from error


def _refusal(reason: str) -> SettingsError:
    return SettingsError(f"the native kernel cannot be used: {reason}", "use --kernel auto; see triforce doctor")
