"""The link between host memory and the device: ordered copies in the background.

A copy is submitted, runs while the device computes, and is waited for where its data is needed. A GPU's link is in
cuda_link.py, a disk's in disk_link.py. The link here is simulated by a thread, for a device on the CPU.
"""

import atexit
import ctypes
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import TriforceError
from ..events import Transferred

LINK_COST = 8.0  # estimated time to copy a byte over a link, relative to reading it from the device's memory
DISK_COST = 12.0  # the same of a read from disk: 1.5 to 3 GB/s where memory gives 20 to 40
Pair = tuple[Any, Any]  # target, source: contiguous tensors of one size and dtype, or a tensor and a disk's FileRange
_PATIENCE = 5.0  # seconds for a copy that is under way when the interpreter exits


class TransferFailed(TriforceError):
    """A copy between host memory and the device has failed. Committed tokens are intact."""


@dataclass(slots=True)
class LinkStatistics:
    """Bytes copied over a link so far, in both directions, and the seconds in which it was busy."""

    bytes: int = 0
    busy_s: float = 0.0

    def event(self) -> Transferred:
        return Transferred(self.bytes, self.busy_s)


class Link(Protocol):
    """Copies that run in the order in which they are submitted."""

    statistics: LinkStatistics

    def copy(self, pairs: Sequence[Pair], after: Any = None) -> Any:
        """Submit copies that begin once the device has reached the mark `after`; return a ticket to wait with."""

    def wait(self, ticket: Any) -> None:
        """Make all later computation see the copies of that ticket. Raises TransferFailed."""

    def finish(self, ticket: Any) -> None:
        """Block until the copies of that ticket have ended, failed or not: the host may use its memory again."""

    def mark(self) -> Any:
        """Return a mark behind everything submitted to the device so far, for `copy`'s `after`."""

    def seconds(self, ticket: Any) -> float | None:
        """Return how long the copies of that ticket took, None until that is known."""


def copy_now(link: Link, pairs: Sequence[Pair]) -> None:
    """Copy over a link behind the device's work so far, and wait for the copies. Raises TransferFailed."""
    link.wait(ticket := link.copy(pairs, link.mark()))
    link.finish(ticket)


class Ticket:
    """A submitted copy of a `BackgroundLink`."""

    __slots__ = ("after", "done", "error", "inner", "pairs", "seconds", "size", "submitted")

    def __init__(self, pairs: Sequence[Pair], after: Any = None) -> None:
        self.pairs: Sequence[Pair] = pairs
        self.after = after
        self.size = sum(source.nbytes for _, source in pairs)
        self.submitted = time.perf_counter()
        self.inner: list[Any] = []  # tickets of another link that this one submits copies to
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.seconds: float | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Wake the threads that wait for the copies, which have ended or failed."""
        self.error, self.pairs, self.after = error, (), None
        self.done.set()


_threads: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Ticket | None]] = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """End all links' threads after the copies under way: a thread that frees tensors while Python exits aborts it.

    The newest first, which may wait for an older link.
    """
    for thread, submitted in reversed(list(_threads.items())):
        with suppress(queue.Empty):
            while True:
                submitted.get_nowait()
        submitted.put(None)
        thread.join(_PATIENCE)


class BackgroundLink:
    """The base of links whose copies are run by a thread, on a device that computes at once: a CPU."""

    def __init__(self) -> None:
        self.statistics = LinkStatistics()
        self._queue: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        work = (weakref.proxy(self), self._queue)
        thread = threading.Thread(target=type(self)._work, args=work, daemon=True, name="link")
        _threads[thread] = self._queue
        thread.start()
        weakref.finalize(self, self._queue.put, None)

    @staticmethod
    def _work(link: Any, submitted: queue.SimpleQueue[Ticket | None]) -> None:
        """Run the copies of a link, to which the thread has only a weak reference, until None comes."""
        while (ticket := submitted.get()) is not None:
            error = None
            try:
                link.transfer(ticket)
            except ReferenceError:  # the link is gone, so nobody waits
                return
            except Exception as failed:
                error = failed
            finally:
                ticket.end(error)
                del ticket, error

    def transfer(self, ticket: Ticket) -> None:
        """Run the copies of a ticket in the link's thread. `wait` raises its errors."""
        raise NotImplementedError

    def copy(self, pairs: Sequence[Pair], after: Any = None) -> Ticket:
        for target, source in pairs:
            assert target.is_contiguous() and source.is_contiguous() and target.nbytes == source.nbytes
        ticket = Ticket(pairs, after)
        self._queue.put(ticket)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        ticket.done.wait()
        if ticket.error is not None:
            raise self._failure(ticket) from ticket.error

    def _failure(self, ticket: Ticket) -> TransferFailed:
        return TransferFailed(
            f"a copy of {ticket.size:,} bytes over the link has failed: {ticket.error}",
            "try again; the output so far is intact",
        )

    def finish(self, ticket: Ticket) -> None:
        ticket.done.wait()

    def mark(self) -> Any:
        return None  # this device computes at once

    def seconds(self, ticket: Ticket) -> float | None:
        return ticket.seconds

    def _note(self, ticket: Ticket, seconds: float) -> None:
        """Count the copies of a ticket, which took so long."""
        ticket.seconds = seconds
        self.statistics.bytes += ticket.size
        self.statistics.busy_s += seconds


class SimulatedLink(BackgroundLink):
    """A link from host memory to host memory, no faster than `bandwidth` bytes/s."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self._free = 0.0  # when the last copy ended
        super().__init__()

    def transfer(self, ticket: Ticket) -> None:
        start = max(ticket.submitted, self._free)
        for target, source in ticket.pairs:
            move(target, source)
        due = start + ticket.size / self.bandwidth
        time.sleep(max(due - time.perf_counter(), 0))
        self._free = max(due, time.perf_counter() - 1e-3)  # a sleep that overran a little is not counted
        self._note(ticket, self._free - start)


def move(target: Any, source: Any) -> None:
    """Copy within host memory in this thread: torch would take threads from the computation."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
