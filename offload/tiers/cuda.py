"""The link of a CUDA GPU: copies on streams of their own, ordered by events; and host memory that it can reach."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..native.blocks import host_memory
from .link import LinkStatistics, Pair, TransferFailed


@dataclass(slots=True)
class _Ticket:
    begun: torch.cuda.Event
    over: torch.cuda.Event
    size: int
    pairs: Sequence[Pair]  # memory that is copied must not be given to others meanwhile
    counted: bool = False


class CudaLink:
    """See `Link`. Nothing here waits for the device but `finish`."""

    def __init__(self, device: torch.device) -> None:
        self.statistics = LinkStatistics()
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, pairs: Sequence[Pair], after: torch.cuda.Event | None = None) -> _Ticket:
        begun, over = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            with torch.cuda.stream(self._stream):
                if after is not None:
                    self._stream.wait_event(after)
                begun.record(self._stream)
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                over.record(self._stream)
        except RuntimeError as error:
            raise TransferFailed(f"a copy over the link has failed: {error}", "see the driver's messages") from error
        return _Ticket(begun, over, sum(source.nbytes for _, source in pairs), pairs)

    def wait(self, ticket: _Ticket) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket.over)

    def finish(self, ticket: _Ticket) -> None:
        ticket.over.synchronize()
        self.seconds(ticket)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, ticket: Any) -> float | None:
        if not ticket.over.query():
            return None
        seconds = ticket.begun.elapsed_time(ticket.over) / 1000
        if not ticket.counted:
            ticket.counted = True
            self.statistics.bytes += ticket.size
            self.statistics.busy_s += seconds
        return seconds


def pinned_memory(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Host memory that the GPU copies from by itself; pageable memory, with a warning, where that is refused.

    Registered rather than allocated by torch, which would round its size up to a power of two.
    """
    memory = host_memory(size, dtype)
    failed = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), max(memory.nbytes, 1), 0)
    if int(failed):
        warnings.warn(
            f"{memory.nbytes:,} bytes of host memory could not be pinned ({failed}): copies will be slower",
            stacklevel=2,
        )
    else:
        weakref.finalize(memory, torch.cuda.cudart().cudaHostUnregister, memory.data_ptr())
    return memory
