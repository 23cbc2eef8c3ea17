"""Links with a scratch file at their far end: reads and writes in the background, and over a device's own link."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..architecture.pages import BOUNCE_BUFFERS, DISK_READ_BYTES
from ..system.scratch_file import ScratchFile
from .link import BackgroundLink, Link, Pair, Ticket, TransferFailed, move


class DiskFailed(TransferFailed):
    """Keys and values could not be read from disk, or written to it. Committed tokens are intact."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """A run of bytes of a file, as the source or the target of a copy."""

    file: ScratchFile
    offset: int
    nbytes: int

    def is_contiguous(self) -> bool:
        """Return True, as `Tensor.is_contiguous`."""
        return True


class DiskLink(BackgroundLink):
    """A link between a file and a CPU's memory. Copies within memory are run in their turn, too."""

    def transfer(self, ticket: Ticket) -> None:
        """Run the copies of a ticket in the link's thread. Raises OSError."""
        start = time.perf_counter()
        for target, source in ticket.pairs:
            _copy(target, source)
        self._note(ticket, time.perf_counter() - start)

    def _failure(self, ticket: Ticket) -> TransferFailed:
        error = ticket.error
        if isinstance(error, TransferFailed):  # of a device's own link
            return type(error)(error.message, error.hint)
        reason = (isinstance(error, OSError) and error.strerror) or error
        return DiskFailed(
            f"the KV cache on disk could not be read or written ({ticket.size:,} bytes): {reason}",
            "the text so far is complete; check the disk and its free space, or give --disk a folder on another one",
        )


def _copy(target: Any, source: Any) -> None:
    if isinstance(source, FileRange):
        source.file.read(_view(target), source.offset)
    elif isinstance(target, FileRange):
        target.file.write(_view(source), target.offset)
    else:
        move(target, source)


def _view(memory: Tensor) -> memoryview:
    """Return memory as writable bytes; it must outlive the view."""
    return memoryview((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())).cast("B")


class StagedLink(DiskLink):
    """A disk's link over that of a device: bytes of a file pass through host memory on their way to the device.

    A thread submits copies to the device's link, and reads and writes the file before and after them: the next part of
    a file is read while the one before goes to the device. Copies keep the order in which they were submitted.
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
        for inner in ticket.inner:
            self._link.wait(inner)

    def finish(self, ticket: Ticket) -> None:
        super().finish(ticket)
        self._finish(*ticket.inner)

    def mark(self) -> Any:
        return self._link.mark()

    def seconds(self, ticket: Ticket) -> float | None:
        """Return how long this link's own work took, or the device link's copies where they took longer."""
        copied = [self._link.seconds(inner) for inner in ticket.inner]
        known = [seconds for seconds in copied if seconds is not None]
        if ticket.seconds is None or len(known) < len(copied):
            return None
        return max(ticket.seconds, sum(known))

    @torch.inference_mode()
    def transfer(self, ticket: Ticket) -> None:
        """Run the copies of a ticket in the link's thread. Raises OSError, TransferFailed."""
        start, is_own = time.perf_counter(), False
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread's own setting
        if not ticket.pairs:
            self._submit(ticket, ())
        for target, source in ticket.pairs:
            is_own |= self._transfer_pair(ticket, target, source)
        ticket.seconds = time.perf_counter() - start if is_own else 0.0

    def _on_host(self, memory: Any) -> bool:
        """Return whether memory is the host's, or the file; a simulated device's memory is treated as a GPU's."""
        return isinstance(memory, FileRange) or (memory.device.type == "cpu" and self._device.type != "cpu")

    def _transfer_pair(self, ticket: Ticket, target: Any, source: Any) -> bool:
        """Run or submit one copy; return whether this thread has read, written or copied itself."""
        of_file = isinstance(target, FileRange) or isinstance(source, FileRange)
        if self._on_host(target) and self._on_host(source):
            if not of_file:
                self._finish(self._submit(ticket, ()))  # copies to the source may be under way
            _copy(target, source)
        elif isinstance(source, FileRange):
            self._read(ticket, target.view(-1).view(torch.uint8), source)
        elif isinstance(target, FileRange):
            self._write(ticket, target, source.view(-1).view(torch.uint8))
        else:
            self._submit(ticket, [(target, source)])
            return False
        return True

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
        """Submit copies of a ticket to the device's link; return its ticket."""
        with self._lock:
            ticket.inner.append(self._link.copy(pairs, ticket.after))
        return ticket.inner[-1]

    def _finish(self, *tickets: Any) -> None:
        with self._lock:
            for ticket in tickets:
                if ticket is not None:
                    self._link.finish(ticket)
