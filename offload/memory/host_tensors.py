"""Host memory for keys and values."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor


def host_memory(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return uninitialised memory that is committed on first write, in huge pages where the system has them.

    Attention to a long context touches every memory page at every token: with pages of 4 KB, TLB misses cost a tenth of
    the bandwidth.
    """
    count = torch.Size(size).numel()
    if not count or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=dtype)
    # Private, because shared memory does not get huge pages.
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a Linux kernel built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(size)
