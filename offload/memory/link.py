"""The link between host memory and the device: ordered copies in the background.

A copy is submitted, runs while the device computes, and is waited for where its data is needed. A GPU's link is in
cuda_link.py. The link here is simulated by a thread, so that order, overlap and failures can be tested on any machine.
"""

import atexit
import ctypes
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..errors import TriforceError
from ..events import Transferred

LINK_COST = 8.0  # estimated time to copy a byte over a link, relative to reading it from the device's memory
DISK_COST = 12.0  # the same of a read from disk: 1.5 to 3 GB/s where memory gives 20 to 40
Pair = tuple[Tensor, Tensor]  # target, source: contiguous, of one size and dtype
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


class Ticket:
    """A submitted copy of a `BackgroundLink`."""

    __slots__ = ("after", "done", "error", "inner", "pairs", "poison", "seconds", "size", "submitted")

    def __init__(self, pairs: Sequence[Pair], after: Any = None) -> None:
        self.pairs: Sequence[Pair] = pairs
        self.after = after
        self.size = sum(source.nbytes for _, source in pairs)
        self.submitted = time.perf_counter()
        self.poison = False  # the link's thread fills the targets with NaN first
        self.inner: list[Any] = []  # tickets of another link that this one submits copies to
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.seconds: float | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Wake those that wait for the copies, which have ended or failed."""
        self.error, self.pairs, self.after = error, (), None
        self.done.set()


_threads: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Ticket | None]] = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """End all links' threads, after the copies under way: one that frees tensors beside the interpreter's end aborts.

    The newest first, which may wait for an older link.
    """
    for thread, submitted in reversed(list(_threads.items())):
        with suppress(queue.Empty):
            while True:
                submitted.get_nowait()
        submitted.put(None)
        thread.join(_PATIENCE)


class BackgroundLink:
    """The base of links whose copies are run by a thread, on a device that computes at once: a CPU.

    `poison`: fill targets with NaN from the submission of a copy on, so that tests notice a missing wait.
    """

    def __init__(self, poison: bool = False) -> None:
        self.statistics = LinkStatistics()
        self._poison = poison
        self._pending: deque[Ticket] = deque()  # for `poison`: submitted copies that may not have ended
        self._queue: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        work = (weakref.proxy(self), self._queue)
        thread = threading.Thread(target=type(self)._work, args=work, daemon=True, name="link")
        _threads[thread] = self._queue
        thread.start()
        weakref.finalize(self, self._queue.put, None)

    @staticmethod
    def _work(link: Any, submitted: queue.SimpleQueue[Ticket | None]) -> None:
        """Run the copies of a link, to which it has only a weak reference, until None comes."""
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

    def transfer(self, ticket: Any) -> None:
        """Run the copies of a ticket in the link's thread. Any error is that of whoever waits for them."""
        raise NotImplementedError

    def copy(self, pairs: Sequence[Pair], after: Any = None) -> Ticket:
        self._check(pairs)
        ticket = Ticket(pairs, after)
        if self._poison:
            self._poison_targets(ticket)
        self._queue.put(ticket)
        return ticket

    def _check(self, pairs: Sequence[Pair]) -> None:
        for target, source in pairs:
            assert target.is_contiguous() and source.is_contiguous() and target.nbytes == source.nbytes

    def _poison_targets(self, ticket: Ticket) -> None:
        """Fill the targets with NaN, unless an earlier copy has yet to read them: then its thread does it in turn."""
        while self._pending and self._pending[0].done.is_set():
            self._pending.popleft()
        sources = [source for earlier in self._pending for _, source in earlier.pairs if isinstance(source, Tensor)]
        targets = [target for target, _ in ticket.pairs if isinstance(target, Tensor)]
        ticket.poison = any(_overlap(target, source) for target in targets for source in sources)
        if not ticket.poison:
            fill_with_nan(ticket.pairs)
        self._pending.append(ticket)

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


class SimulatedLink(BackgroundLink):
    """A link from host memory to host memory, no faster than a given rate.

    Args:
        bandwidth: bytes/s.
        before: called with the pairs before they are copied, by the link's thread, so that tests can delay or fail.
        poison: as in BackgroundLink.
    """

    def __init__(
        self,
        bandwidth: float,
        before: Callable[[Sequence[Pair]], None] | None = None,
        poison: bool = False,
    ) -> None:
        self.bandwidth = bandwidth
        self._before = before
        self._free = 0.0  # when the last copy ended
        super().__init__(poison)

    def transfer(self, ticket: Ticket) -> None:
        """Run one copy in the link's thread, after the last one has ended."""
        start = max(ticket.submitted, self._free)
        if ticket.poison:
            fill_with_nan(ticket.pairs)
        if self._before is not None:
            self._before(ticket.pairs)
        for target, source in ticket.pairs:  # torch would take threads from the computation
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        due = start + ticket.size / self.bandwidth
        time.sleep(max(due - time.perf_counter(), 0))
        self._free = max(due, time.perf_counter() - 1e-3)  # a sleep that overran a little is not counted
        ticket.seconds = self._free - start
        self.statistics.bytes += ticket.size
        self.statistics.busy_s += ticket.seconds


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def fill_with_nan(pairs: Sequence[Pair]) -> None:
    for target, _ in pairs:
        if isinstance(target, Tensor):
            ctypes.memset(target.data_ptr(), 255, target.nbytes)  # NaN in every floating-point type
