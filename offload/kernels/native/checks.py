"""Checks of the tensors of a call, before their addresses are given to the kernel, which cannot see their sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .structs import BLOCK, MAX_HEAD_DIM

FLOATS = (torch.bfloat16, torch.float32)


class InvalidCall(ValueError):
    """A call's tensors have other dtypes, sizes or strides than the kernel reads and writes; nothing was run."""


def require(is_met: bool, rule: str) -> None:
    """Raise InvalidCall with `rule` if it is not met."""
    if not is_met:
        raise InvalidCall(rule)


def check(name: str, x: Tensor, size: Sequence[int], *dtypes: torch.dtype) -> None:
    """Raise InvalidCall if a tensor is not contiguous host memory of that size and of one of the dtypes."""
    if not (x.dtype in dtypes and x.shape == size and x.is_contiguous() and x.is_cpu):
        kinds = " or ".join(str(dtype) for dtype in dtypes)
        found = f"{list(x.shape)} of {x.dtype} on {x.device}, strides {list(x.stride())}"
        raise InvalidCall(f"{name} must be {list(size)} of {kinds}, contiguous, in host memory; it is {found}")


def check_head_dim(dim: int) -> None:
    """Raise InvalidCall if the kernel does not support heads of so many dimensions."""
    is_served = 0 < dim <= MAX_HEAD_DIM and dim % BLOCK == 0
    require(is_served, f"heads have a multiple of {BLOCK} dimensions, at most {MAX_HEAD_DIM}, not {dim}")


def address(x: Tensor | None) -> int | None:
    """Return where a tensor starts, or None."""
    return None if x is None else x.data_ptr()
