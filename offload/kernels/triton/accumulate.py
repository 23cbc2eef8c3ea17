"""Attention by Triton's kernels: of one pass over stored keys, and over parts of keys that arrive one after another."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..accumulate import Newest
from ..attention import Partial
from . import ROWS, ops
from .ops import PackedMemory, attend, attend_runs, finished, new_state

Operands = Callable[[Tensor], tuple[Tensor, Tensor, int]]  # page -> keys, values, layout


class TritonAccumulator:
    """See `Accumulator` in kernels/accumulate.py; for up to `ROWS` tokens on a GPU.

    Keys are divided among splits, whose states are carried from page to page; one launch at the end merges them.
    """

    newest: Newest = "meanwhile"

    def __init__(self, q: Tensor, kv_heads: int, operands: Operands) -> None:
        assert len(q) <= ROWS
        self._q, self._operands = q, operands
        self._splits = ops.useful_splits(q.device, kv_heads)
        self._states = new_state(q, self._splits + 2)  # the last ones are other accumulators'
        self._begun = [False] * len(q)  # rows that have a state
        self._others = 0

    def attend(self, page: Tensor, rows: slice, seen: int, causal: bool = False) -> None:
        state, fresh = self._states[: self._splits, rows], not self._begun[rows.start]
        self._launch(page, self._q[rows], state, seen, causal, fresh)
        self._begun[rows] = [True] * (rows.stop - rows.start)

    def _launch(self, page: Tensor, q: Tensor, state: Tensor, seen: int, causal: bool, fresh: bool) -> None:
        keys, values, layout = self._operands(page)
        attend(q, keys, values, state, seen, causal, fresh, layout)

    def add(self, rows: slice, part: Any) -> None:
        raise NotImplementedError("other partial results come as a state")

    def add_state(self, state: Tensor) -> None:
        self._states[self._splits + self._others].copy_(state, non_blocking=True)
        self._others += 1

    def state(self) -> Tensor:
        raise NotImplementedError("nothing adds a GPU's result to another")

    def output(self, lse: Tensor | None = None) -> Tensor:
        first = 0 if self._begun[0] else self._splits
        return finished(self._states[first : self._splits + self._others], self._q, lse)


class PackedAccumulator(TritonAccumulator):
    """An accumulator to which packed pages can be added too: those for which `memory` does not return None."""

    def __init__(
        self, q: Tensor, kv_heads: int, operands: Operands, memory: Callable[[Tensor], PackedMemory | None]
    ) -> None:
        super().__init__(q, kv_heads, operands)
        self._memory = memory

    def _launch(self, page: Tensor, q: Tensor, state: Tensor, seen: int, causal: bool, fresh: bool) -> None:
        if (memory := self._memory(page)) is None:
            super()._launch(page, q, state, seen, causal, fresh)
        else:
            attend_runs(q, *memory, state, seen, causal, fresh)


class GroupAccumulator:
    """Attention of rotated queries `[tokens, heads, head_dim]`, to which parts of the keys are added in any order.

    Of a pass of more than `ROWS` tokens, keys are not split among the GPU's processors: rows are enough work, and
    states would take too much memory. planning/memory.py counts them.
    """

    newest: Newest = "first"

    def __init__(self, q: Tensor, kv_heads: int) -> None:
        self._q = q
        self._splits = ops.useful_splits(q.device, kv_heads) if len(q) <= ROWS else 1
        self._states = new_state(q, self._splits + 1)  # the last one is the host's
        self._has_begun = self._has_host = False

    def attend_exact(self, rows: slice, keys: Tensor, values: Tensor, before: int) -> None:
        """Begin rows with the newest keys `[kv_heads, tokens, head_dim]`, causally: `before` and those of the rows."""
        attend(self._q[rows], keys, values, self._states[: self._splits, rows], before + 1)
        self._has_begun = True

    def attend_groups(self, rows: slice, groups: Tensor, stop: int) -> None:
        """Add the first `stop` quantised groups of `[kv_heads, groups, bytes]`, of which every row sees all."""
        if stop > 0:
            state = self._states[: self._splits, rows]
            ops.attend_groups(self._q[rows], groups, state, stop, not self._has_begun)
            self._has_begun = True

    def add(self, rows: slice, part: Any) -> None:
        raise NotImplementedError("other partial results come as a state")

    def add_state(self, state: Tensor) -> None:
        """Add what the host has summed, `[tokens, heads, 2 + head_dim]`; see `Accumulator.state`."""
        self._states[self._splits].copy_(state, non_blocking=True)
        self._has_host = True

    def output(self, lse: Tensor | None = None) -> Tensor:
        """Return the attention to all keys added, as q; `lse` `[tokens, heads]` in fp32 is filled, if given."""
        first = 0 if self._has_begun else self._splits
        return finished(self._states[first : self._splits + self._has_host], self._q, lse)

    def partial(self) -> Partial:
        """Return the output with its log-sum-exp."""
        lse = torch.empty(self._q.shape[:2], dtype=torch.float32, device=self._q.device)
        return Partial(self.output(lse), lse)


def _state_of(q: Tensor, kv_heads: int) -> Tensor:
    """Return room for the states of a pass over all keys at once."""
    return new_state(q, ops.useful_splits(q.device, kv_heads))


def _partial(state: Tensor, q: Tensor) -> Partial:
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return Partial(finished(state, q, lse), lse)


def attend_stored(q: Tensor, keys: Tensor, values: Tensor, lse: Tensor | None = None) -> Tensor:
    """Attend to stored keys and values, causally to the last, which are the queries' own; two launches.

    q `[tokens, heads, head_dim]`, keys and values `[kv_heads, at least tokens, head_dim]`, rotated; returns as q.
    `lse` `[tokens, heads]` in fp32, if given, is filled with the log-sum-exp.
    """
    state = _state_of(q, len(keys))
    attend(q, keys, values, state, keys.shape[1] - len(q) + 1)
    return finished(state, q, lse)


def attend_keys(q: Tensor, keys: Tensor, values: Tensor) -> Partial:
    """Attend with every query to every key. Shapes as of `attend_stored`; `out` of the result is in the type of q."""
    state = _state_of(q, len(keys))
    attend(q, keys, values, state, keys.shape[1], causal=False)
    return _partial(state, q)


def attend_growing(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Do what `attend_stored` does over the first keys of a whole store; how many they are is in device memory.

    keys and values `[kv_heads, capacity, head_dim]`; `seen`: an integer `[1]`, what the first query sees.
    """
    state = _state_of(q, len(keys))
    attend(q, keys, values, state, 0, lengths=seen)
    return finished(state, q)


def attend_table(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, chunk: int, lengths: tuple[int, int] | Tensor
) -> Tensor:
    """Attend to the selected chunks of a whole store and to its tail, causally to the queries' own keys, which end it.

    q `[tokens, heads, head_dim]`, keys and values `[kv_heads, capacity, head_dim]`, rotated; returns as q.

    Args:
        table: numbers of chunks of `chunk` tokens, `[kv_heads, slots]` in int32.
        lengths: how many keys the first query sees, and the position of the tail; or integers `[3]` in device memory
            for a recorded step: those keys, the number of slots that are used, and that position.
    """
    state = _state_of(q, len(keys))
    if isinstance(lengths, Tensor):
        attend(q, keys, values, state, 0, table=table, chunk=chunk, lengths=lengths)
    else:
        seen, tail = lengths
        attend(q, keys, values, state, seen, table=table, chunk=chunk, tail=tail)
    return finished(state, q)


def attend_table_before(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, chunk: int, lengths: tuple[int, int]
) -> Partial:
    """Attend with every query to the same keys of the selected chunks and of the tail. Arguments as of `attend_table`.

    The `out` of the result is in the type of q.
    """
    state, (seen, tail) = _state_of(q, len(keys)), lengths
    attend(q, keys, values, state, seen, causal=False, table=table, chunk=chunk, tail=tail)
    return _partial(state, q)


def attend_packed(q: Tensor, memory: PackedMemory, seen: int | Tensor, lse: Tensor | None = None) -> Tensor:
    """Do what `attend_stored` does over packed runs, in the same bits.

    `seen`: keys that the first query sees; an integer `[1]` in device memory for a recorded step.
    """
    state = _state_of(q, len(memory[0]))
    length, seen = (seen, 0) if isinstance(seen, Tensor) else (None, seen)
    attend_runs(q, *memory, state, seen, length=length)
    return finished(state, q, lse)


def attend_packed_before(q: Tensor, memory: PackedMemory, seen: int) -> Partial:
    """Do what `attend_keys` does over the first `seen` keys of packed runs, in the same bits, for any rows."""
    parts = []
    for some in q.split(ROWS):
        state = _state_of(some, len(memory[0]))
        attend_runs(some, *memory, state, seen, causal=False)
        parts.append(_partial(state, some))
    return Partial(*map(torch.cat, zip(*parts, strict=True))) if len(parts) > 1 else parts[0]
