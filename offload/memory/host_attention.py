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
from .page import PageFormat


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


class HostThread:
    """A thread that attends to whole pages in host memory, beside what `device` does.

    `bandwidth`, in bytes/s, slows it down to that rate: to model another machine's host memory.
    """

    def __init__(self, device: torch.device, bandwidth: float | None = None) -> None:
        self._bandwidth = bandwidth
        # OpenMP's number of threads belongs to a thread: the new one does not inherit this one's.
        threads = thread_count(device)
        self._pool = ThreadPoolExecutor(1, "host-attention", torch.set_num_threads, (threads,))

    def attend_each(self, pages: Tensor, attend: Callable[[int, Tensor], Any]) -> Future[HostResult]:
        """Compute the partial result `attend(index, page)` of each of the pages `[n, numbers]`, for queries on the CPU.

        The queries must not change until the result is ready.
        """
        return self._submit(pages, lambda: ([attend(index, page) for index, page in enumerate(pages)], None))

    def submit(self, pages: Tensor, first: int, q: Tensor) -> Future[HostResult]:
        """Attend to all tokens of pages `[n, numbers]`, which are those from number `first` on.

        The rotated queries must not change until the result is ready. Only a subclass knows what pages contain.
        """
        raise NotImplementedError

    def _copied(self, q: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Begin to copy a GPU's queries to the host; return where they will be, and the event when they are."""
        copy = torch.empty(q.shape, dtype=q.dtype, pin_memory=True).copy_(q, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(q.device))
        return copy, arrived

    def _submit(
        self,
        pages: Tensor,
        compute: Callable[[], tuple[list[Any], Tensor | None]],
        arrived: torch.cuda.Event | None = None,
    ) -> Future[HostResult]:
        return self._pool.submit(self._run, pages, compute, arrived)

    def _run(
        self,
        pages: Tensor,
        compute: Callable[[], tuple[list[Any], Tensor | None]],
        arrived: torch.cuda.Event | None,
    ) -> HostResult:
        if arrived is not None:
            arrived.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            partials, state = compute()
        if self._bandwidth is not None:
            time.sleep(max(start + pages.nbytes / self._bandwidth - time.perf_counter(), 0))
        return HostResult(len(pages), time.perf_counter() - start, partials, state)


class HostAttention(HostThread):
    """Attends to whole pages of a page format."""

    def __init__(self, format: PageFormat, device: torch.device, bandwidth: float | None = None) -> None:
        super().__init__(device, bandwidth)
        self._format = format.host

    def submit(self, pages: Tensor, first: int, q: Tensor) -> Future[HostResult]:
        if q.device.type == "cpu":
            return self.attend_each(pages, lambda _, page: self._format.attend(page, q, self._format.tokens))
        copy, arrived = self._copied(q)
        return self._submit(pages, lambda: ([], self._summed(pages, copy)), arrived)

    def _summed(self, pages: Tensor, q: Tensor) -> Tensor:
        """Return the state of attention to all the pages, in pinned memory."""
        result = self._format.accumulator(q)
        for page in pages:
            result.attend(page, slice(0, len(q)), self._format.tokens)
        return result.state().pin_memory()


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
