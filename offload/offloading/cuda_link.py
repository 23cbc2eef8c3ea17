"""The link of a CUDA GPU: copies on streams of their own, ordered by events; and host memory that it can reach."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import Degraded
from ..kv_cache.block_store import host_memory
from .link import LinkStatistics, Pair, TransferFailed


@dataclass(slots=True)
class _Ticket:
    begun: torch.cuda.Event
    over: torch.cuda.Event
    size: int
    reach: tuple[int, int]  # addresses of the host's memory: from, to


class CudaLink:
    """See `Link`. Nothing here waits for the device but `finish`.

    Each direction has a stream, so that both go on at once; a copy waits for those in the other direction that touch
    the same host memory: what is on its way there has come before it is read, and what is read is not overwritten.
    """

    def __init__(self, device: torch.device) -> None:
        self.statistics = LinkStatistics()
        self._device = device
        self._to_device, self._to_host = (torch.cuda.Stream(device) for _ in range(2))
        self._pending: dict[Any, deque[_Ticket]] = {self._to_device: deque(), self._to_host: deque()}

    def copy(self, pairs: Sequence[Pair], after: torch.cuda.Event | None = None) -> _Ticket:
        for target, source in pairs:
            assert target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype
            assert target.shape == source.shape
        there, back = self._to_device, self._to_host
        stream, other = (back, there) if pairs and _on_host(pairs[0][0]) else (there, back)
        begun, over = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        ticket = _Ticket(begun, over, sum(source.nbytes for _, source in pairs), _reach(pairs))
        self._count()
        try:
            with torch.cuda.stream(stream):
                for event in (*([after] if after is not None else ()), *self._in_the_way(ticket, other)):
                    stream.wait_event(event)
                begun.record(stream)
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                    # Else the device's memory, if freed now, would be given to others before the copy is over.
                    (source if _on_host(target) else target).record_stream(stream)
                over.record(stream)
        except RuntimeError as error:
            raise TransferFailed(f"a copy over the link has failed: {error}", "see the driver's messages") from error
        self._pending[stream].append(ticket)
        return ticket

    def _in_the_way(self, ticket: _Ticket, other: Any) -> list[torch.cuda.Event]:
        """The copies of the other direction to wait for."""
        first, last = ticket.reach
        return [each.over for each in self._pending[other] if each.reach[0] < last and first < each.reach[1]]

    def wait(self, ticket: _Ticket) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket.over)

    def finish(self, ticket: _Ticket) -> None:
        ticket.over.synchronize()
        self._count()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, ticket: _Ticket) -> float | None:
        return ticket.begun.elapsed_time(ticket.over) / 1000 if ticket.over.query() else None

    def _count(self) -> None:
        """Take what is over into the statistics, and forget it."""
        for tickets in self._pending.values():
            while tickets and (seconds := self.seconds(tickets[0])) is not None:
                self.statistics.bytes += tickets.popleft().size
                self.statistics.busy_s += seconds


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _reach(pairs: Sequence[Pair]) -> tuple[int, int]:
    """From the first to behind the last byte of host memory that the copies touch; all of it, if there are none."""
    ours = [target if _on_host(target) else source for target, source in pairs]
    return min((x.data_ptr() for x in ours), default=0), max((x.data_ptr() + x.nbytes for x in ours), default=2**64)


def pinned_memory(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Host memory that the GPU copies from by itself; pageable memory, with a warning, where that is refused.

    Registered rather than allocated by torch, which would round its size up to a power of two.
    """
    memory = host_memory(size, dtype)
    if not memory.nbytes:
        return memory
    failed = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(failed):
        _forget_error()
        warnings.warn(
            f"{memory.nbytes:,} bytes of host memory could not be pinned ({failed}): copies will be slower",
            Degraded,
            stacklevel=2,
        )
    else:
        weakref.finalize(memory, _unpin, memory.data_ptr())
    return memory


def _unpin(address: int) -> None:
    torch.cuda.synchronize()  # copies may be under way
    torch.cuda.cudart().cudaHostUnregister(address)


def _forget_error() -> None:
    """The driver keeps a refusal in mind, and torch would take it for one of whatever it starts next."""
    try:
        torch.zeros(1, device="cuda").add_(1)
    except RuntimeError:  # this was it
        pass
