"""Torch's threads beside the kernel's: while the kernel computes a model, torch needs none of its own.

Torch runs an operation over a vocabulary or a chunk of a prompt on OpenMP's threads, which spin afterwards on the
processors that the kernel's own pool needs (see pool.h), and beside another busy process they wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ...system.machine import usable_cores
from .kernel import Kernel

_Event = TypeVar("_Event")
_Answer = TypeVar("_Answer")
_Result = TypeVar("_Result")


def use_threads(count: int) -> None:
    """Let torch and the kernel run on `count` threads; for 0 on no more than this process has cores.

    Torch counts the cores of the machine: in a container with a quota many more, which wait for each other. Less is
    left as it is, as is what OMP_NUM_THREADS says.
    """
    if not count and not os.environ.get("OMP_NUM_THREADS") and usable_cores() < torch.get_num_threads():
        count = usable_cores()
    if count:
        torch.set_num_threads(count)


@contextmanager
def usual_threads() -> Iterator[None]:
    """Let torch and the kernel run meanwhile on as many threads as without a call of `use_threads`."""
    threads = torch.get_num_threads()
    use_threads(0 if os.environ.get("OMP_NUM_THREADS") else usable_cores())
    try:
        yield
    finally:
        use_threads(threads)


class torch_on_one_thread:
    """Run torch's operations of the calling thread on this thread alone; the kernel still uses all that torch had.

    They run in inference mode, and where `kernel` is None on torch's own threads. Blocks may be nested; one may be
    entered again after its end.
    """

    def __init__(self, kernel: Kernel | None) -> None:
        self._kernel, self._mode = kernel, torch.inference_mode()

    def __enter__(self) -> None:
        self._mode.__enter__()
        if self._kernel is not None:
            self._kernel.limit_torch(True)

    def __exit__(self, *error: object) -> None:
        if self._kernel is not None:
            self._kernel.limit_torch(False)
        self._mode.__exit__(*error)


def generate_on_one_thread(
    kernel: Kernel | None, events: Generator[_Event, _Answer, _Result]
) -> Generator[_Event, _Answer, _Result]:
    """Yield from `events`, which run as under `torch_on_one_thread`; the consumer's code between them does not."""
    answer: Any = None  # what starts a generator
    limited = torch_on_one_thread(kernel)
    try:
        while True:
            with limited:
                try:
                    event = events.send(answer)
                except StopIteration as end:
                    return end.value
            answer = yield event
    finally:
        with torch.inference_mode():
            events.close()
