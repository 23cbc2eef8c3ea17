"""Attention on the host over pages in host memory, in a thread of its own, while the device attends to other pages."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .page import PageFormat


class HostPartials(NamedTuple):
    """The partial result of each page, in order, and the seconds that all of them took."""

    partials: list[Any]
    seconds: float


class HostAttention:
    """Attends to whole pages in host memory.

    `bandwidth`, in bytes/s, slows it down to that rate: to model another machine's host memory.
    """

    def __init__(self, format: PageFormat, bandwidth: float | None = None) -> None:
        self._format = format
        self._bandwidth = bandwidth
        self._pool = ThreadPoolExecutor(1, "host-attention")

    def submit(self, pages: Tensor, q: Tensor) -> Future[HostPartials]:
        """Attend to all tokens of pages `[n, numbers]`; the rotated `q` must not change until the result is ready."""
        if q.device.type == "cpu":
            return self._pool.submit(self._run, pages, q, None)
        copy = torch.empty(q.shape, dtype=q.dtype, pin_memory=True).copy_(q, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(q.device))
        return self._pool.submit(self._run, pages, copy, arrived)

    def _run(self, pages: Tensor, q: Tensor, arrived: torch.cuda.Event | None) -> HostPartials:
        if arrived is not None:
            arrived.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            partials = [self._format.attend(page, q, self._format.tokens) for page in pages]
        if self._bandwidth is not None:
            time.sleep(max(start + pages.nbytes / self._bandwidth - time.perf_counter(), 0))
        return HostPartials(partials, time.perf_counter() - start)
