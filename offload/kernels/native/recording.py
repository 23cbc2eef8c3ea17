"""Forward passes recorded as lists of kernel calls, which one call repeats: what CUDA graphs are on a GPU.

A pass of one token makes ten calls a layer, and Python needs longer to prepare one than the kernel to run the small
ones. All passes of as many rows over the same memory make the same calls, but for the fields of `struct pass`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .library import Call, Pass

if TYPE_CHECKING:
    from .kernel import Kernel

APPEND, ATTEND, LINEAR, NORM, GATE, COPY = range(6)  # as in types.h
_PARTS = 8  # calls into the library for a pass: Python answers signals between two of them


class PassInputs(NamedTuple):
    """What differs between two passes over a cache: where their tokens are, and which keys they see.

    `start` is the position of the first token, of which `stored` have been stored already; it sees `seen` keys. `rows`
    are the rotations of the tokens. `parents` is a tree's, in int32, as `BlockCalls.attention` takes it.
    """

    start: int
    seen: int
    rows: tuple[Tensor, Tensor]
    stored: int = 0
    parents: Tensor | None = None


class Recording:
    """Kernel calls in order. What they refer to is kept alive, and must stay where it is."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, ctypes.Structure]] = []
        self._operands: list[object] = []
        self._parts: list[tuple[ctypes.Array[Call], Pass]] = []

    def add(self, kind: int, call: ctypes.Structure, *operands: object) -> None:
        """Add a call, which is not run now; `operands` are the tensors and structs that it refers to."""
        self._calls.append((kind, call))
        self._operands += operands

    def run(self, kernel: Kernel, inputs: PassInputs) -> None:
        """Run all calls with other inputs. Raises what the kernel raises."""
        cos, sin = inputs.rows
        parents = inputs.parents
        assert cos.is_contiguous() and sin.is_contiguous() and (parents is None or parents.is_contiguous())
        for _, part in self._parts or self._prepare():
            part.start, part.seen, part.stored = inputs.start, inputs.seen, inputs.stored
            part.cos, part.sin = cos.data_ptr(), sin.data_ptr()
            part.parents = None if parents is None else parents.data_ptr()
            part.nodes = 0 if parents is None else len(parents)
            kernel.run(part)

    def _prepare(self) -> list[tuple[ctypes.Array[Call], Pass]]:
        """Return the calls in parts, each with the struct that runs it."""
        size, parts = -(-len(self._calls) // _PARTS), []
        for at in range(0, len(self._calls), size):
            some = [Call(kind, ctypes.addressof(call)) for kind, call in self._calls[at : at + size]]
            array = (Call * len(some))(*some)
            parts.append((array, Pass(calls=array, count=len(some))))
        self._parts = parts  # all at once: an interrupt must not leave some
        return parts


class Recorder(threading.local):
    """What this thread is recording, if anything: its kernel calls are added to it, and not run."""

    recording: Recording | None = None

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record the kernel calls of this thread until the end of the block."""
        assert self.recording is None, "recordings cannot be nested"
        self.recording = Recording()
        try:
            yield self.recording
        finally:
            self.recording = None


recorder = Recorder()
