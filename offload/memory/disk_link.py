"""The link between a scratch file and memory: ordered reads and writes in the background."""

import ctypes
import queue
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ..architecture.tier_footprint import DISK_READ_BYTES
from ..system.scratch_file import view_of
from .disk_pages import FileRange
from .link import BackgroundLink, Pair, Ticket, TransferFailed, fill_with_nan

_NOTHING = object()  # no ticket waits


class DiskFailed(TransferFailed):
    """Keys and values could not be read from disk, or written to it. Committed tokens are intact."""


class DiskLink(BackgroundLink):
    """A link whose far end is a file. Neighbouring reads that wait in the queue are done at once.

    Copies between two places in memory are run in their turn, too.
    """

    @staticmethod
    def _work(link: Any, submitted: queue.SimpleQueue[Ticket | None]) -> None:
        ticket: Any = submitted.get()
        while ticket is not None:
            batch, ticket = _neighbours(ticket, submitted)
            error = None
            try:
                link.transfer(batch)
            except ReferenceError:  # the link is gone, so nobody waits
                return
            except Exception as failed:
                error = failed
            finally:
                for each in batch:
                    each.end(error)
                del batch, error
            if ticket is _NOTHING:
                ticket = submitted.get()

    def transfer(self, batch: Sequence[Ticket]) -> None:
        """Run the copies of some tickets in the link's thread. Raises OSError."""
        start = time.perf_counter()
        for ticket in batch:
            if ticket.poison:
                fill_with_nan(ticket.pairs)
        for run in _runs([pair for ticket in batch for pair in ticket.pairs]):
            _copy(run)
        busy, size = time.perf_counter() - start, sum(ticket.size for ticket in batch)
        for ticket in batch:
            ticket.seconds = busy * (ticket.size / size if size else 1)
        self.statistics.bytes += size
        self.statistics.busy_s += busy

    def _failure(self, ticket: Ticket) -> TransferFailed:
        return disk_failure(ticket)


def disk_failure(ticket: Ticket) -> DiskFailed:
    """Return the error that a ticket's copies from or to a disk have failed."""
    error = ticket.error
    reason = (isinstance(error, OSError) and error.strerror) or error
    return DiskFailed(
        f"the KV cache on disk could not be read or written ({ticket.size:,} bytes): {reason}",
        "the text so far is complete; check the disk and its free space, or give --disk a folder on another one",
    )


def _neighbours(ticket: Ticket, submitted: queue.SimpleQueue[Ticket | None]) -> tuple[list[Ticket], Any]:
    """Return the ticket with the reads that continue it in the file and wait in the queue, and the ticket after them.

    The latter is _NOTHING if no other one waits.
    """
    batch, size = [ticket], ticket.size
    while True:
        try:
            following = submitted.get_nowait()
        except queue.Empty:
            return batch, _NOTHING
        if following is None or not _continues(batch[-1], following) or size + following.size > DISK_READ_BYTES:
            return batch, following
        batch.append(following)
        size += following.size


def _continues(ticket: Ticket, following: Ticket) -> bool:
    """Return whether two tickets are one read each, of neighbouring parts of a file."""
    if len(ticket.pairs) != 1 or len(following.pairs) != 1:
        return False
    return _are_joined(ticket.pairs[0], following.pairs[0]) and isinstance(following.pairs[0][1], FileRange)


def _are_joined(pair: Pair, following: Pair) -> bool:
    """Return whether two reads, or two writes, are of neighbouring parts of a file."""
    return any(
        isinstance(one, FileRange)
        and isinstance(other, FileRange)
        and one.file is other.file
        and one.offset + one.nbytes == other.offset
        for one, other in zip(pair, following, strict=True)
    )


def _runs(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Yield the copies in order, those that one call can do together."""
    run: list[Pair] = []
    size = 0
    for pair in pairs:
        nbytes = pair[0].nbytes
        if run and (size + nbytes > DISK_READ_BYTES or not _are_joined(run[-1], pair)):
            yield run
            run, size = [], 0
        run.append(pair)
        size += nbytes
    if run:
        yield run


def _copy(run: Sequence[Pair]) -> None:
    target, source = run[0]
    if isinstance(source, FileRange):
        source.file.read([_view(each) for each, _ in run], source.offset)
    elif isinstance(target, FileRange):
        target.file.write([_view(each) for _, each in run], target.offset)
    else:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def _view(memory: Tensor) -> memoryview:
    return view_of(memory.data_ptr(), memory.nbytes)
