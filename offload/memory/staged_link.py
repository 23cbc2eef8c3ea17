"""The link of a device beside a disk: what lies in a file passes through host memory on its way to the device."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..architecture.tier_footprint import BOUNCE_BUFFERS, DISK_READ_BYTES
from ..settings.validation import require
from ..system.scratch_file import view_of
from .disk_link import DiskLink, disk_failure
from .disk_pages import FileRange
from .host_memory import allocator
from .link import BackgroundLink, Link, Pair, SimulatedLink, Ticket, TransferFailed


class _StagedTicket(Ticket):
    """A ticket with those of the device's own link."""

    __slots__ = ("inner",)

    def __init__(self, pairs: Sequence[Pair], after: Any = None) -> None:
        super().__init__(pairs, after)
        self.inner: list[Any] = []


class StagedLink(BackgroundLink):
    """A `Link` over another one. A thread submits its copies, and reads and writes the file before and after them.

    The next piece of a file is read while the one before goes to the device. Copies keep the order in which they were
    submitted, whatever they are between. The thread has the other link to itself, but for waits.
    """

    def __init__(
        self, link: Link, device: torch.device, allocate: Callable[[tuple[int, ...], torch.dtype], Tensor]
    ) -> None:
        """`link` is that of `device`; `allocate` makes host memory from which it copies fast."""
        self._link, self._device = link, device
        self._lock = threading.Lock()  # of `_link`
        with torch.inference_mode(False):
            self._buffers = allocate((BOUNCE_BUFFERS, DISK_READ_BYTES), torch.uint8).unbind()
        self._last: list[Any] = [None] * BOUNCE_BUFFERS  # the last copy from each buffer, or to it
        self._next = 0
        super().__init__()
        self.statistics = link.statistics

    def copy(self, pairs: Sequence[Pair], after: Any = None) -> _StagedTicket:
        self._check(pairs)
        ticket = _StagedTicket(pairs, after)
        self._queue.put(ticket)
        return ticket

    def wait(self, ticket: _StagedTicket) -> None:
        super().wait(ticket)
        for each in ticket.inner:
            self._link.wait(each)

    def _failure(self, ticket: Ticket) -> TransferFailed:
        if isinstance(ticket.error, TransferFailed):  # of the other link
            return type(ticket.error)(ticket.error.message, ticket.error.hint)
        return disk_failure(ticket)

    def finish(self, ticket: _StagedTicket) -> None:
        super().finish(ticket)
        self._finish(*ticket.inner)

    def mark(self) -> Any:
        return self._link.mark()

    @torch.inference_mode()
    def transfer(self, ticket: _StagedTicket) -> None:
        """Run the copies of a ticket in the link's thread. Raises OSError, TransferFailed."""
        start = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread's own setting
        for pair in ticket.pairs:
            self._transfer_pair(ticket, *pair)
        if not ticket.pairs:
            self._submit(ticket, ())
        ticket.seconds = time.perf_counter() - start if any(map(self._is_done_here, ticket.pairs)) else 0.0

    def seconds(self, ticket: Ticket) -> float | None:
        """Return how long this link's own work took, or the other link's copies where they took longer."""
        assert isinstance(ticket, _StagedTicket)
        if ticket.seconds is None:
            return None
        copied = 0.0
        for each in ticket.inner:
            seconds = self._link.seconds(each)
            if seconds is None:
                return None
            copied += seconds
        return max(ticket.seconds, copied)

    def _is_done_here(self, pair: Pair) -> bool:
        """Return whether this link's thread itself reads, writes or copies, instead of the other link alone."""
        return any(isinstance(each, FileRange) for each in pair) or all(map(self._is_here, pair))

    def _transfer_pair(self, ticket: _StagedTicket, target: Tensor | FileRange, source: Tensor | FileRange) -> None:
        if isinstance(source, FileRange):
            if self._is_here(target):
                source.file.read([_view(target)], source.offset)
            else:
                self._read(ticket, _bytes(target), source)
        elif isinstance(target, FileRange):
            if self._is_here(source):
                target.file.write([_view(source)], target.offset)
            else:
                self._write(ticket, target, _bytes(source))
        elif self._is_here(target) and self._is_here(source):
            self._finish(self._submit(ticket, ()))  # copies to the source may be under way
            target.copy_(source)
        else:
            self._submit(ticket, [(target, source)])

    def _is_here(self, memory: Tensor) -> bool:
        """Return whether the host can use memory itself; a simulated device's is treated as a GPU's."""
        return memory.device.type == "cpu" and self._device.type != "cpu"

    def _read(self, ticket: _StagedTicket, target: Tensor, source: FileRange) -> None:
        for some, index in self._pieces(source.nbytes):
            piece = self._buffers[index][: some.stop - some.start]
            source.file.read([_view(piece)], source.offset + some.start)
            self._last[index] = self._submit(ticket, [(target[some], piece)])

    def _write(self, ticket: _StagedTicket, target: FileRange, source: Tensor) -> None:
        for some, index in self._pieces(target.nbytes):
            piece = self._buffers[index][: some.stop - some.start]
            self._last[index] = self._submit(ticket, [(piece, source[some])])
            self._finish(self._last[index])
            self._link.wait(self._last[index])  # raises, if it has failed
            target.file.write([_view(piece)], target.offset + some.start)

    def _pieces(self, size: int) -> Iterator[tuple[slice, int]]:
        """Yield pieces of so many bytes, each with the number of a buffer that is free."""
        for start in range(0, size, DISK_READ_BYTES):
            self._next = (self._next + 1) % BOUNCE_BUFFERS
            self._finish(self._last[self._next])
            yield slice(start, min(start + DISK_READ_BYTES, size)), self._next

    def _submit(self, ticket: _StagedTicket, pairs: Sequence[Pair]) -> Any:
        """Submit copies of a ticket to the other link; return its ticket."""
        with self._lock:
            ticket.inner.append(self._link.copy(pairs, ticket.after))
        return ticket.inner[-1]

    def _finish(self, *tickets: Any) -> None:
        with self._lock:
            for each in tickets:
                if each is not None:
                    self._link.finish(each)


def _bytes(memory: Tensor) -> Tensor:
    return memory.view(-1).view(torch.uint8)


def _view(memory: Tensor) -> memoryview:
    return view_of(memory.data_ptr(), memory.nbytes)


def make_link(device: torch.device, gb_s: float | None = None, to_disk: bool = False) -> Link:
    """Return a simulated link of `gb_s` 10^9 bytes/s, or if None the device's own; a CPU has one to the disk only.

    `to_disk`: pages may lie on disk, too. Raises SettingsError for a CPU alone.
    """
    if to_disk and device.type == "cpu" and gb_s is None:
        return DiskLink()
    if to_disk:
        return StagedLink(make_link(device, gb_s), device, allocator(device))
    if gb_s is not None:
        return SimulatedLink(gb_s * 1e9)
    hint = "give the rate of a simulated one, such as link_gb_s=25, or a folder on disk"
    require(device.type == "cuda", f"a {device.type} has no link to offload keys and values over", hint)
    from .cuda_link import CudaLink

    return CudaLink(device)
