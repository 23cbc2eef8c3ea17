"""Attention on the host over pages in host memory, in a thread of its own, while the device attends to other pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.accumulate import PassResult
from ..system.machine import usable_cores
from .balance import Balance
from .page import PageLayout


class HostResult(NamedTuple):
    """The result of host attention to some pages, and the seconds that it took.

    For queries on the CPU the partial result of each page, in order; for a GPU their sum, an accumulator's state in
    pinned memory, which goes up in one copy.
    """

    pages: int
    seconds: float
    partials: list[Any]
    state: Tensor | None = None


def thread_count(device: torch.device) -> int:
    """Return how many threads attend on the host beside a device.

    As many as torch has; with a GPU one core is left to the thread that launches its kernels: it would otherwise wait
    for a processor, and the GPU for it.
    """
    threads = torch.get_num_threads()
    return threads if device.type == "cpu" else max(min(threads, usable_cores() - 1), 1)


class HostAttention:
    """A thread that attends to whole pages of a format in host memory, beside what `device` does.

    `bandwidth`, in bytes/s, slows it down to that rate: to model another machine's host memory. `sums`: whether results
    are a sum, as those for a GPU are.
    """

    def __init__(
        self, format: PageLayout, device: torch.device, bandwidth: float | None = None, sums: bool = False
    ) -> None:
        self._format, self._bandwidth, self._sums = format.host, bandwidth, sums
        # OpenMP's number of threads belongs to a thread: the new one does not inherit this one's.
        threads = thread_count(device)
        self._pool = ThreadPoolExecutor(1, "host-attention", torch.set_num_threads, (threads,))

    def submit(
        self, pages: Tensor, first: int, q: Tensor, attend: Callable[[int, Tensor, Tensor], Any] | None = None
    ) -> Future[HostResult]:
        """Attend to all tokens of pages `[n, numbers]`, which are those from number `first` on.

        The rotated queries must not change until the result is ready. `attend` does what the format's `attend_whole`
        does, in its place.
        """
        arrived = None
        if q.device.type != "cpu":
            q = torch.empty(q.shape, dtype=q.dtype, pin_memory=True).copy_(source := q, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(source.device))
        return self._pool.submit(self._run, pages, first, q, attend or self._format.attend_whole, arrived)

    @torch.inference_mode()
    def _run(
        self,
        pages: Tensor,
        first: int,
        q: Tensor,
        attend: Callable[[int, Tensor, Tensor], Any],
        arrived: torch.cuda.Event | None,
    ) -> HostResult:
        if arrived is not None:
            arrived.synchronize()
        start, state = time.perf_counter(), None
        partials = (attend(number, page, q) for number, page in enumerate(pages, first))
        if arrived is not None or self._sums:
            result = self._format.accumulator(q)
            for part in partials:
                result.add(slice(0, len(q)), part)
            state = result.state() if arrived is None else result.state().pin_memory()
        found = list(partials)
        if self._bandwidth is not None:
            time.sleep(max(start + pages.nbytes / self._bandwidth - time.perf_counter(), 0))
        return HostResult(len(pages), time.perf_counter() - start, found, state)


def add_from_host(
    host: Future[HostResult], rows: int, rest: float | None, balance: Balance, result: PassResult
) -> None:
    """Wait for host attention of `rows` tokens, note its time, and add its result; `rest` as in `observe_host`."""
    found = host.result()
    balance.observe_host(rows, found.seconds / found.pages, rest)
    for part in found.partials:
        result.add(slice(0, rows), part)
    if found.state is not None:
        result.add_state(found.state)
