"""Tensors that lie one behind the other in a row of bytes: one copy moves them all over a link."""

import mmap
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

_ALIGNMENT = 256  # bytes; kernels are fastest on operands that begin there


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def row_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of a row for these tensors: whole pages, so that rows can be pinned one by one."""
    return -(-sum(map(_aligned, tensors)) // mmap.PAGESIZE) * mmap.PAGESIZE


def views(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of the dtypes and sizes of `like` over the bytes of a row, uint8."""
    starts = accumulate(map(_aligned, like), initial=0)
    return [
        row[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, like, strict=False)
    ]


def copy_into(row: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy tensors to a row."""
    for target, tensor in zip(views(row, tensors), tensors, strict=True):
        target.copy_(tensor)


def sizes_of(tensors: Sequence[Tensor]) -> tuple:
    """Return what two lists of tensors have in common if the same views fit both."""
    return tuple((tensor.dtype, tensor.shape) for tensor in tensors)
