"""Attention on the host over pages in host memory, in a thread of its own, while the device attends to other pages.

The pages are split between the two so that both finish together.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.accumulate import PassResult
from ..system.machine import usable_cores
from .host_memory import pinned
from .page import PageLayout

HOST_ROWS = 64  # tokens of a pass that the host of a GPU shares: for more, attention is bound by arithmetic
_SMOOTHING = 0.8  # weight of the old average when a new time is measured


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

    `sums`: whether results are a sum, as those for a GPU are.
    """

    def __init__(self, format: PageLayout, device: torch.device, sums: bool = False) -> None:
        self._format, self._sums = format.host, sums
        # OpenMP's number of threads belongs to a thread: the new one does not inherit this one's.
        threads = thread_count(device)
        self._pool = ThreadPoolExecutor(1, "host-attention", torch.set_num_threads, (threads,))

    def submit(self, pages: Sequence[Tensor] | Tensor, q: Tensor) -> Future[HostResult]:
        """Attend to all tokens of pages `[n, numbers]`; the queries must not change until the result is ready."""
        arrived = None
        if q.device.type != "cpu":
            q = pinned(torch.empty(q.shape, dtype=q.dtype)).copy_(source := q, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(source.device))
        return self._pool.submit(self._run, pages, q, arrived)

    @torch.inference_mode()
    def _run(self, pages: Sequence[Tensor] | Tensor, q: Tensor, arrived: torch.cuda.Event | None) -> HostResult:
        if arrived is not None:
            arrived.synchronize()
        start, state = time.perf_counter(), None
        partials = (self._format.attend_whole(page, q) for page in pages)
        if arrived is not None or self._sums:
            result = self._format.accumulator(q)
            for part in partials:
                result.add(slice(0, len(q)), part)
            state = result.state() if arrived is None else pinned(result.state())
        kept = list(partials)
        return HostResult(len(pages), time.perf_counter() - start, kept, state)


class Balance:
    """The split between link and host, from times measured while running.

    `share` is the host's fraction of the pages: 0 streams all, 1 leaves all to the host, None follows the measurements.
    Passes of more than `most_rows` tokens are streamed.
    """

    def __init__(self, share: float | None, most_rows: float = float("inf")) -> None:
        self._share, self._most_rows = share, most_rows
        self._link: float | None = None  # seconds per page
        self._host: dict[int, float] = {}  # seconds per page, by the bit length of the number of rows
        self._rest: dict[int, float] = {}  # seconds between two layers' attentions, in which only the link works

    def streamed(self, pages: int, rows: int) -> int:
        """Return how many of `pages` whole pages to stream, for a pass of `rows` tokens."""
        if rows > self._most_rows:
            return pages
        if self._share is not None:
            return pages - round(self._share * pages)
        kind = rows.bit_length()
        link, host = self._link, self._host.get(kind)
        if link is None or host is None:  # half each, to measure both
            return -(-pages // 2)
        # pages * s * link = rest + pages * (1 - s) * host
        total = self._rest.get(kind, 0.0) + pages * host
        least = 1 if pages > 1 else 0  # for either side: a side without pages is never measured again
        return min(max(round(total / (link + host)), least), pages - least)

    def observe_link(self, seconds: float) -> None:
        """Note that a page took `seconds` on the link."""
        self._link = _averaged(self._link, seconds)

    def observe_host(self, rows: int, seconds: float, rest: float | None) -> None:
        """Note that the host took `seconds` per page, `rest` seconds after the previous layer's attention."""
        kind = rows.bit_length()
        self._host[kind] = _averaged(self._host.get(kind), seconds)
        if rest is not None:
            self._rest[kind] = _averaged(self._rest.get(kind), rest)


def _averaged(average: float | None, new: float) -> float:
    return new if average is None else _SMOOTHING * average + (1 - _SMOOTHING) * new


def add_from_host(
    host: Future[HostResult], rows: int, rest: float | None, balance: Balance, result: PassResult
) -> None:
    """Wait for host attention of `rows` tokens, note its time, and add its result; `rest` as in `observe_host`."""
    answer = host.result()
    balance.observe_host(rows, answer.seconds / answer.pages, rest)
    for part in answer.partials:
        result.add(slice(0, rows), part)
    if answer.state is not None:
        result.add_state(answer.state)
