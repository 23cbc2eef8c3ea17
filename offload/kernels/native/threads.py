"""Torch's threads beside the kernel's: while the kernel computes a model, torch needs none of its own.

Torch runs an operation over a vocabulary or a chunk of a prompt on OpenMP's threads, which spin afterwards on the
processors that the kernel's own pool needs (see pool.h), and beside another busy process they wait for each other.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from .kernel import Kernel

_Event = TypeVar("_Event")
_Answer = TypeVar("_Answer")
_Result = TypeVar("_Result")


@contextmanager
def torch_on_one_thread(kernel: Kernel | None) -> Iterator[None]:
    """Run torch's operations of the calling thread on this thread alone; the kernel still uses all that torch had.

    They run in inference mode, and where `kernel` is None on torch's own threads. May be nested.
    """
    with torch.inference_mode():
        if kernel is None:
            yield
            return
        kernel.limit_torch(True)
        try:
            yield
        finally:
            kernel.limit_torch(False)


def generate_on_one_thread(
    kernel: Kernel | None, events: Generator[_Event, _Answer, _Result]
) -> Generator[_Event, _Answer, _Result]:
    """Yield from `events`, which run as under `torch_on_one_thread`; the consumer's code between them does not."""
    answer = None
    try:
        while True:
            with torch_on_one_thread(kernel):
                try:
                    event = events.send(answer)
                except StopIteration as end:
                    return end.value
            answer = yield event
    finally:
        with torch.inference_mode():
            events.close()
