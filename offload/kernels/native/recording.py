"""Forward passes recorded as lists of kernel calls, which one call repeats: what CUDA graphs are on a GPU.

A pass of one token makes ten calls a layer, and Python needs longer to prepare one than the kernel to run the small
ones. What is computed of all rows, and what is computed over the keys and values of one sequence, are recorded
separately, each for any number of rows: a pass of a batch is then put together of what has been recorded.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import structs
from .checks import check, require
from .structs import Call, LayerCalls, Pass

if TYPE_CHECKING:
    from .kernel import Kernel

APPEND, ATTEND, LINEAR, NORM, GATE, COPY, LAYER, UNPACK = range(8)  # as in types.h
_PARTS = 8  # calls into the library for a pass: Python answers signals between two of them


class PassInputs(NamedTuple):
    """What differs between two passes over the cache of a sequence: where their tokens are, and which keys they see.

    `start` is the position of the first of the `tokens`, of which `stored` have been stored already; it sees `seen`
    keys. `rotations` are the addresses of their rows of cos and sin, which the cache keeps alive. `parents` is a
    tree's, in int32, as `BlockCalls.attention` takes it.
    """

    start: int
    seen: int
    tokens: int
    rotations: tuple[int, int]
    stored: int = 0
    parents: Tensor | None = None


class Recording:
    """Kernel calls in order. What they refer to is kept alive, and must stay where it is."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._operands: list[object] = []

    def add(self, kind: int, call: ctypes.Structure, *operands: object) -> None:
        """Add a call, which is not run now; `operands` are the tensors and structs that it refers to."""
        self._calls.append(Call(kind, 0, ctypes.addressof(call)))
        self._operands += call, *operands

    def add_layer(self, layer: int) -> None:
        """Say that each sequence's calls of a layer are to be run here."""
        self._calls.append(Call(LAYER, layer, None))

    @property
    def kinds(self) -> list[int]:
        """The kinds of the calls."""
        return [call.kind for call in self._calls]

    def parts(self, most: int) -> list[ctypes.Array[Call]]:
        """Return the calls in up to `most` parts."""
        size = max(-(-len(self._calls) // most), 1)
        return [_array(self._calls[at : at + size]) for at in range(0, len(self._calls), size)]


class SequenceCalls:
    """What has been recorded of one sequence: for each layer its appends and copies, and the call that attends."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._recordings = recordings  # the calls refer to them
        self._calls = [recording.parts(1)[0] for recording in recordings]
        for recording in recordings:
            require(recording.kinds.count(ATTEND) == 1, "a layer of a recorded pass has one attention")
        self.layers = (LayerCalls * len(recordings))(*(LayerCalls(calls, len(calls)) for calls in self._calls))


class RecordedLayers:
    """The calls of all layers for the rows of a pass; those of its sequences are given when it is run."""

    def __init__(self, recording: Recording, head: Recording | None = None) -> None:
        """`head`: what is computed of all rows behind the layers, where `run` is asked for it."""
        self._recordings = recording, head  # the calls refer to them
        self._parts = recording.parts(_PARTS)
        self._passes = [Pass(calls, None, len(calls)) for calls in self._parts]
        self._head = [] if head is None else [Pass(calls, None, len(calls)) for calls in head.parts(1)]
        self._sequences = (structs.Sequence * 0)()

    def run(
        self, kernel: Kernel, sequences: Sequence[tuple[SequenceCalls, PassInputs]], with_head: bool = False
    ) -> None:
        """Run a pass of sequences, whose rows follow each other. Raises what the kernel raises."""
        if len(self._sequences) < len(sequences):
            self._sequences = (structs.Sequence * len(sequences))()
        filled, rows = self._sequences, 0
        for fields, (calls, inputs) in zip(filled, sequences, strict=False):
            fields.first, fields.layers = rows, calls.layers
            _fill(fields, inputs)
            rows += inputs.tokens
        for part in (*self._passes, *self._head) if with_head else self._passes:
            part.sequences, part.sequence_count, part.rows = filled, len(sequences), rows
            kernel.run(part)


def rotations_of(rows: tuple[Tensor, Tensor]) -> tuple[int, int]:
    """Return the addresses of rows of cos and sin, each `[tokens, 1, head_dim]`."""
    for x in rows:
        check("cos and sin", x, (len(x), 1, x.shape[2]), x.dtype)
    return rows[0].data_ptr(), rows[1].data_ptr()


def _array(calls: Sequence[Call]) -> ctypes.Array[Call]:
    return (Call * len(calls))(*calls)


def _fill(fields: structs.Sequence, given: PassInputs) -> None:
    parents = given.parents
    if parents is not None:
        check("parents", parents, (len(parents),), torch.int32)
    fields.start, fields.seen, fields.stored, fields.tokens = given.start, given.seen, given.stored, given.tokens
    fields.cos, fields.sin = given.rotations
    fields.parents = None if parents is None else parents.data_ptr()
    fields.nodes = 0 if parents is None else len(parents)


class Recorder(threading.local):
    """What this thread is recording, if anything: its kernel calls are added to it, and not run."""

    recording: Recording | None = None

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record the kernel calls of this thread until the end of the block."""
        require(self.recording is None, "recordings cannot be nested")
        self.recording = Recording()
        try:
            yield self.recording
        finally:
            self.recording = None


recorder = Recorder()
