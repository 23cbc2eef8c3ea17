"""Attention on the host over keys and values where they lie, by a thread of its own, while the device does its part."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .page import Form


class HostPart(NamedTuple):
    """What the form's `attend` gave for each piece, in order, and the seconds that all of them took."""

    partials: list[Any]
    seconds: float


class HostAttention:
    """Attends to whole pieces in host memory.

    `bandwidth`, in bytes a second, holds it back to that rate: to see on one machine how two that differ work together.
    """

    def __init__(self, form: Form, bandwidth: float | None = None) -> None:
        self._form = form
        self._bandwidth = bandwidth
        self._pool = ThreadPoolExecutor(1, "host-attention")

    def submit(self, pieces: Tensor, q: Tensor) -> Future[HostPart]:
        """Attend to all tokens of pieces `[n, numbers]`; q, rotated, must stay as it is until the result is there."""
        if q.device.type == "cpu":
            return self._pool.submit(self._run, pieces, q, None)
        copy = torch.empty(q.shape, dtype=q.dtype, pin_memory=True).copy_(q, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(q.device))
        return self._pool.submit(self._run, pieces, copy, arrived)

    def _run(self, pieces: Tensor, q: Tensor, arrived: torch.cuda.Event | None) -> HostPart:
        if arrived is not None:
            arrived.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            partials = [self._form.attend(piece, q, self._form.tokens) for piece in pieces]
        if self._bandwidth is not None:
            time.sleep(max(start + pieces.nbytes / self._bandwidth - time.perf_counter(), 0))
        return HostPart(partials, time.perf_counter() - start)
