"""The connection between host memory and the device: copies in their order, in the background.

A copy is asked for, goes on while something else computes, and is waited for where its data is needed. A GPU's link is
in cuda.py; the one here is simulated by a thread, so that order, overlap and failures can be seen on any machine.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import TriforceError
from ..events import Transferred

Pair = tuple[Tensor, Tensor]  # to, from: contiguous, of one size and type


class TransferFailed(TriforceError):
    """A copy between host memory and the device has failed. What was committed before is intact."""


@dataclass(slots=True)
class LinkStatistics:
    """What has gone over a link so far, both ways: bytes, and the seconds in which it was busy."""

    bytes: int = 0
    busy_s: float = 0.0

    def event(self) -> Transferred:
        """How it stands."""
        return Transferred(self.bytes, self.busy_s)


class Link(Protocol):
    """Copies in the order in which they are asked for."""

    statistics: LinkStatistics

    def copy(self, pairs: Sequence[Pair], after: Any = None) -> Any:
        """Begin to copy once what had been computed at the mark `after` is done; returns a ticket to wait with."""
        ...

    def wait(self, ticket: Any) -> None:
        """What is computed from now on sees the copies of that ticket. Raises TransferFailed."""
        ...

    def finish(self, ticket: Any) -> None:
        """Return when the copies of that ticket are over, failed or not: the host may use its memory again."""
        ...

    def mark(self) -> Any:
        """What has been asked to be computed up to now, for `copy`'s `after`."""
        ...

    def seconds(self, ticket: Any) -> float | None:
        """How long the copies of that ticket took; None as long as it is not known."""
        ...


class _Job:
    __slots__ = ("asked", "done", "error", "pairs", "seconds", "size")

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs: Sequence[Pair] = pairs
        self.size = sum(source.nbytes for _, source in pairs)
        self.asked = time.perf_counter()
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.seconds: float | None = None


class SimulatedLink:
    """Host memory to host memory by a thread of its own, no faster than a given rate.

    Args:
        bandwidth: bytes a second.
        latency: seconds that every call of `copy` takes beside.
        before: called with a job's pairs before they are copied, by the link's thread: tests delay or fail there.
        poison: fill with NaN what is to be written, when a copy is asked for: who does not wait will be found out.
    """

    def __init__(
        self,
        bandwidth: float,
        latency: float = 0.0,
        before: Callable[[Sequence[Pair]], None] | None = None,
        poison: bool = False,
    ) -> None:
        self.bandwidth, self.latency = bandwidth, latency
        self.statistics = LinkStatistics()
        self._before, self._poison = before, poison
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(weakref.proxy(self), self._jobs), daemon=True, name="link").start()
        weakref.finalize(self, self._jobs.put, None)

    def copy(self, pairs: Sequence[Pair], after: Any = None) -> _Job:
        for target, source in pairs:
            assert target.is_contiguous() and source.is_contiguous() and target.nbytes == source.nbytes
            if self._poison:
                target.view(torch.uint8).fill_(255)  # in every floating-point type no number
        job = _Job(pairs)
        self._jobs.put(job)
        return job

    def wait(self, ticket: _Job) -> None:
        ticket.done.wait()
        if ticket.error is not None:
            raise TransferFailed(
                f"a copy of {ticket.size:,} bytes over the link has failed: {ticket.error}",
                "try again; nothing that was said before is lost",
            ) from ticket.error

    def finish(self, ticket: _Job) -> None:
        ticket.done.wait()

    def mark(self) -> None:
        return None  # on this device what was asked for has been computed

    def seconds(self, ticket: _Job) -> float | None:
        return ticket.seconds

    def transfer(self, job: _Job, free: float) -> float:
        """Do one job, by the link's thread; `free` is when the last one ended. Returns when this one did."""
        start = max(job.asked, free)
        if self._before is not None:
            self._before(job.pairs)
        for target, source in job.pairs:  # not by torch, which would take the threads of those who compute
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        due = start + self.latency + job.size / self.bandwidth
        time.sleep(max(due - time.perf_counter(), 0))
        end = max(due, time.perf_counter() - 1e-3)  # a sleep that was a little long costs nothing
        job.seconds = end - start
        self.statistics.bytes += job.size
        self.statistics.busy_s += job.seconds
        return end


def _work(link: SimulatedLink, jobs: queue.SimpleQueue[_Job | None]) -> None:
    free = 0.0
    while (job := jobs.get()) is not None:
        try:
            free = link.transfer(job, free)
        except ReferenceError:  # nobody is left to wait
            return
        except Exception as error:
            job.error = error
        finally:
            job.pairs = ()
            job.done.set()
            del job
