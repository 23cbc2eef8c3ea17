"""Links with a scratch file at their far end: reads and writes in the background, and over a device's own link."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..architecture.pages import BOUNCE_BUFFERS, DISK_READ_BYTES
from .disk_pages import FileRange
from .link import BackgroundLink, Link, Pair, Ticket, TransferFailed, fill_with_nan


class DiskFailed(TransferFailed):
    """Keys and values could not be read from disk, or written to it. Committed tokens are intact."""


class DiskLink(BackgroundLink):
    """A link between a file and a CPU's memory. Copies between two places in memory are run in their turn, too."""

    def transfer(self, ticket: Ticket) -> None:
        """Run the copies of a ticket in the link's thread. Raises OSError."""
        start = time.perf_counter()
        if ticket.poison:
            fill_with_nan(ticket.pairs)
        for target, source in ticket.pairs:
            _copy(target, source)
        ticket.seconds = time.perf_counter() - start
        self.statistics.bytes += ticket.size
        self.statistics.busy_s += ticket.seconds

    def _failure(self, ticket: Ticket) -> TransferFailed:
        """Return the error that the copies of a ticket have failed."""
        error = ticket.error
        if isinstance(error, TransferFailed):  # of a device's own link
            return type(error)(error.message, error.hint)
        reason = (isinstance(error, OSError) and error.strerror) or error
        return DiskFailed(
            f"the KV cache on disk could not be read or written ({ticket.size:,} bytes): {reason}",
            "the text so far is complete; check the disk and its free space, or give --disk a folder on another one",
        )


def _copy(target: Tensor | FileRange, source: Tensor | FileRange) -> None:
    if isinstance(source, FileRange):
        source.file.read(_view(target), source.offset)
    elif isinstance(target, FileRange):
        target.file.write(_view(source), target.offset)
    else:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def _view(memory: Tensor) -> memoryview:
    """Return memory as writable bytes; it must outlive the view."""
    return memoryview((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())).cast("B")


class StagedLink(DiskLink):
    """A link over that of a device: what lies in a file passes through host memory on its way to the device.

    A thread submits copies to the other link, and reads and writes the file before and after them: the next part of a
    file is read while the one before goes to the device. Copies keep the order in which they were submitted.
    """

    def __init__(
        self, link: Link, device: torch.device, allocate: Callable[[tuple[int, ...], torch.dtype], Tensor]
    ) -> None:
        """`link` is that of `device`; `allocate` makes host memory from which it copies fast."""
        self._link, self._device = link, device
        self._lock = threading.Lock()  # of `_link`, which is used by this thread and by those that wait
        with torch.inference_mode(False):
            self._buffers = allocate((BOUNCE_BUFFERS, DISK_READ_BYTES), torch.uint8).unbind()
        self._last: list[Any] = [None] * BOUNCE_BUFFERS  # the last copy from each buffer, or to it
        self._next = 0
        super().__init__()
        self.statistics = link.statistics

    def wait(self, ticket: Ticket) -> None:
        super().wait(ticket)
        for each in ticket.inner:
            self._link.wait(each)

    def finish(self, ticket: Ticket) -> None:
        super().finish(ticket)
        self._finish(*ticket.inner)

    def mark(self) -> Any:
        return self._link.mark()

    def seconds(self, ticket: Ticket) -> float | None:
        """Return how long this link's own work took, or the other link's copies where they took longer."""
        copied = [self._link.seconds(each) for each in ticket.inner]
        if ticket.seconds is None or None in copied:
            return None
        return max(ticket.seconds, sum(copied))

    @torch.inference_mode()
    def transfer(self, ticket: Ticket) -> None:
        """Run the copies of a ticket in the link's thread. Raises OSError, TransferFailed."""
        start = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread's own setting
        for pair in ticket.pairs or [()]:
            self._transfer_pair(ticket, pair)
        is_own = any(self._is_done_here(pair) for pair in ticket.pairs)
        ticket.seconds = time.perf_counter() - start if is_own else 0.0

    def _is_done_here(self, pair: Pair) -> bool:
        """Return whether this link's thread itself reads, writes or copies, instead of the other link alone."""
        return any(isinstance(each, FileRange) for each in pair) or all(map(self._is_here, pair))

    def _is_here(self, memory: Tensor) -> bool:
        """Return whether the host can use memory itself; a simulated device's is treated as a GPU's."""
        return memory.device.type == "cpu" and self._device.type != "cpu"

    def _transfer_pair(self, ticket: Ticket, pair: Sequence[Any]) -> None:
        files = [isinstance(each, FileRange) for each in pair]
        if not any(files):
            if not pair or not all(map(self._is_here, pair)):
                self._submit(ticket, [pair] if pair else [])
                return
            self._finish(self._submit(ticket, ()))  # copies to the source may be under way
            pair[0].copy_(pair[1])
        elif self._is_here(pair[files.index(False)]):
            _copy(*pair)
        elif files[1]:
            self._read(ticket, pair[0].view(-1).view(torch.uint8), pair[1])
        else:
            self._write(ticket, pair[0], pair[1].view(-1).view(torch.uint8))

    def _read(self, ticket: Ticket, target: Tensor, source: FileRange) -> None:
        for some, index in self._parts(source.nbytes):
            part = self._buffers[index][: some.stop - some.start]
            source.file.read(_view(part), source.offset + some.start)
            self._last[index] = self._submit(ticket, [(target[some], part)])

    def _write(self, ticket: Ticket, target: FileRange, source: Tensor) -> None:
        for some, index in self._parts(target.nbytes):
            part = self._buffers[index][: some.stop - some.start]
            self._last[index] = self._submit(ticket, [(part, source[some])])
            self._finish(self._last[index])
            self._link.wait(self._last[index])  # raises, if it has failed
            target.file.write(_view(part), target.offset + some.start)

    def _parts(self, size: int) -> Iterator[tuple[slice, int]]:
        """Yield parts of so many bytes, each with the number of a buffer that is free."""
        for start in range(0, size, DISK_READ_BYTES):
            self._next = (self._next + 1) % BOUNCE_BUFFERS
            self._finish(self._last[self._next])
            yield slice(start, min(start + DISK_READ_BYTES, size)), self._next

    def _submit(self, ticket: Ticket, pairs: Sequence[Pair]) -> Any:
        """Submit copies of a ticket to the other link; return its ticket."""
        with self._lock:
            ticket.inner.append(self._link.copy(pairs, ticket.after))
        return ticket.inner[-1]

    def _finish(self, *tickets: Any) -> None:
        with self._lock:
            for each in tickets:
                if each is not None:
                    self._link.finish(each)
