"""Host memory for what does not stay on the device: in huge pages, and pinned for CUDA.

Memory is pinned piece by piece in a thread: it takes seconds, in which other work can be done.
"""

from __future__ import annotations

import math
import mmap
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from ..errors import Degraded
from ..system.platform import new_memory

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
PIECE = 2**30  # bytes that are pinned at once, a fraction of a second
_POLL = 0.1  # seconds between two reports


def host_memory(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return uninitialised memory that is committed on first write, in huge pages if there are any.

    Attention to a long context touches every memory page at every token: with pages of 4 KB, TLB misses cost a tenth of
    the bandwidth.
    """
    count = torch.Size(size).numel()
    if not count:
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(new_memory(count * dtype.itemsize), dtype=dtype, count=count).view(size)


def new_pages(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised memory for pages on a device; on a CPU aligned for groups."""
    with torch.inference_mode(False):
        return host_memory(size, dtype) if device.type == "cpu" else torch.empty(size, dtype=dtype, device=device)


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy from host memory to where groups and blocks are.

    Within host memory in this thread: torch's threads would take cores from those that read the next tokens.
    """
    if target.device.type != "cpu":
        target.copy_(source)
        return
    np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())


def allocator(device: torch.device) -> Allocate:
    """Return the allocator of uninitialised host memory for a device: pinned memory for a GPU."""
    return pinned_memory if device.type == "cuda" else host_memory


def begin_allocation(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Pinning | None]:
    """Return uninitialised host memory for a device, and what pins it for a GPU in the background."""
    memory = host_memory(size, dtype)
    return memory, Pinning(memory) if device.type == "cuda" and memory.nbytes else None


def pinned_memory(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return uninitialised pinned host memory; pageable memory and a `Degraded` warning if pinning is refused."""
    memory = host_memory(size, dtype)
    Pinning(memory).wait()
    return memory


def pinned(values: Tensor) -> Tensor:
    """Return a pinned copy of few numbers in host memory, or the numbers themselves if pinning is refused.

    Copies of pageable memory are correct as well: the driver makes the thread wait for them.
    """
    try:
        return values.pin_memory()
    except RuntimeError:
        _clear_error()
        return values


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to the device without waiting: from pageable memory, the copy would wait."""
    if device.type == "cpu":
        return values
    return pinned(values).to(device, non_blocking=True)  # torch keeps pinned memory until its copies have ended


def download(values: Tensor) -> list[int]:
    """Return integers `[n]` of the device by one copy, which waits until the device has computed them."""
    return values.tolist()


class Pinning:
    """Pins a tensor's memory, until the tensor is freed. If that is refused, the rest of it stays pageable.

    The memory is registered rather than allocated by torch, which would round its size up to a power of two.
    """

    def __init__(self, memory: Tensor) -> None:
        self.total, self.done = memory.nbytes, 0  # bytes
        self._pieces = list(pieces(memory))
        self._cudart, self._device = torch.cuda.cudart(), torch.cuda.current_device()
        self._pinned: list[int] = []  # addresses of pieces
        self._stop = threading.Event()
        self._refusal = ""
        # It has no reference to the memory, which is therefore freed as soon as its owner is.
        self._thread = threading.Thread(target=self._run, daemon=True, name="pinning")
        weakref.finalize(memory, self._release)
        self._thread.start()

    def progress(self) -> Iterator[tuple[int, int]]:
        """Yield bytes pinned and bytes in all, about ten times a second, until `wait` would return at once."""
        while self._thread.is_alive():
            yield self.done, self.total
            self._thread.join(_POLL)
        self.wait()

    def wait(self) -> None:
        """Wait until everything is pinned; emit a `Degraded` warning, once, if that was refused."""
        self._thread.join()
        refusal, self._refusal = self._refusal, ""
        if refusal:
            text = f"{self.total - self.done:,} of {self.total:,} bytes of host memory could not be pinned ({refusal})"
            warnings.warn(f"{text}: copies will be slower", Degraded, stacklevel=2)

    def _run(self) -> None:
        torch.cuda.set_device(self._device)  # a thread's own setting
        for address, size in self._pieces:
            if self._stop.is_set():
                break
            failed = self._cudart.cudaHostRegister(address, size, 0)
            if int(failed):
                _clear_error()
                self._refusal = str(failed)
                break
            self._pinned.append(address)
            self.done += size
        if self._stop.is_set():
            self._unpin()

    def _release(self) -> None:
        """Stop, and unpin what was pinned, before the memory is freed."""
        self._stop.set()
        if threading.current_thread() is not self._thread:  # as it may be, if it happens to collect garbage
            self._thread.join()
            self._unpin()

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.synchronize()  # copies may be under way
        while self._pinned:
            self._cudart.cudaHostUnregister(self._pinned.pop())


def pieces(memory: Tensor) -> Iterator[tuple[int, int]]:
    """Yield address and bytes of the pieces to pin: whole rows of the first axis, which begin at pages of the system.

    A copy within a row thus never spans two pieces, which CUDA might refuse. A tensor with one axis is one piece.
    """
    address, total = memory.data_ptr(), memory.nbytes
    each = total
    if memory.dim() > 1 and total and address % mmap.PAGESIZE == 0:
        unit = math.lcm(total // len(memory), mmap.PAGESIZE)
        each = max(PIECE // unit, 1) * unit
    for first in range(0, total, max(each, 1)):
        yield address + first, min(each, total - first)


def _clear_error() -> None:
    """Clear the driver's last error, which torch would otherwise attribute to this thread's next launch."""
    try:
        torch.zeros(1, device="cuda").add_(1)
    except RuntimeError:  # the error that is cleared by being reported
        pass
