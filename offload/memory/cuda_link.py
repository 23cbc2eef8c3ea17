"""The link of a CUDA GPU: copies on dedicated streams, ordered by events."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .link import LinkStatistics, Pair, TransferFailed


@dataclass(slots=True)
class _Ticket:
    begun: torch.cuda.Event
    over: torch.cuda.Event
    size: int  # bytes
    extent: tuple[int, int]  # host addresses that it touches: first, and behind the last


class CudaLink:
    """A `Link` on two CUDA streams. Only `finish` blocks the host.

    Each direction has its own stream, so both run at once. A copy waits for copies in the other direction that touch
    the same host memory: data arrives on the host before it is read, and is not overwritten while it is read.
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
        stream, other = self._to_device, self._to_host
        if pairs and _on_host(pairs[0][0]):
            stream, other = other, stream
        begun, over = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        ticket = _Ticket(begun, over, sum(source.nbytes for _, source in pairs), _host_extent(pairs))
        self._count()
        try:
            with torch.cuda.stream(stream):
                for event in (*([after] if after is not None else ()), *self._conflicts(ticket, other)):
                    stream.wait_event(event)
                begun.record(stream)
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                    # Otherwise device memory that is freed now could be allocated again before the copy ends.
                    (source if _on_host(target) else target).record_stream(stream)
                over.record(stream)
        except RuntimeError as error:
            raise TransferFailed(f"a copy over the link has failed: {error}", "see the driver's messages") from error
        self._pending[stream].append(ticket)
        return ticket

    def _conflicts(self, ticket: _Ticket, other: Any) -> list[torch.cuda.Event]:
        """Return the end events of pending copies of the other direction that touch the same host memory."""
        first, last = ticket.extent
        return [copy.over for copy in self._pending[other] if copy.extent[0] < last and first < copy.extent[1]]

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
        """Add finished copies to the statistics, and drop them."""
        for tickets in self._pending.values():
            while tickets and (seconds := self.seconds(tickets[0])) is not None:
                self.statistics.bytes += tickets.popleft().size
                self.statistics.busy_s += seconds


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _host_extent(pairs: Sequence[Pair]) -> tuple[int, int]:
    """Return the first and the end address of host memory that the copies touch; all of it without copies."""
    host = [target if _on_host(target) else source for target, source in pairs]
    return min((x.data_ptr() for x in host), default=0), max((x.data_ptr() + x.nbytes for x in host), default=2**64)
