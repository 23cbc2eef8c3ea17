"""The retrieval cache on a GPU with quantised copies of the selected chunks, to which Triton's kernel attends."""

from __future__ import annotations

import torch
from torch import Tensor

from ..architecture.kv_formats import GROUP, group_bytes
from ..kernels.attention import attend_masked, merge
from ..kernels.kv_groups import quantize_groups
from ..kernels.triton.group_accumulator import GroupAccumulator
from ..memory.plain_store import PlainStore
from ..settings.method_sizes import PADDING
from .full import FullCache
from .retrieval import CopiedCache
from .selection import Refresh, Selector
from .static_step import StoreStep

_AT_ONCE = 8 * 2**20  # bytes of keys in fp32 that are quantised together


class QuantizedCopiedCache(CopiedCache):
    """Slots of quantised groups in memory of their own; `store` has the tail alone, as it is in the full cache."""

    def __init__(
        self, full: FullCache, selector: Selector, refresh: Refresh, budget: int, chunk: int, tail: int, kind: str
    ) -> None:
        """Make a cache as in `SelectedCache`, of a format of quantised keys and values; chunks are whole groups."""
        assert chunk % GROUP == 0, "chunks are whole groups"
        super().__init__(full, selector, refresh, budget, chunk, tail)
        shape = full.store.shape
        size = (shape.layers, shape.kv_heads, self.budget // GROUP, group_bytes(kind, shape.head_dim))
        self._kind = kind
        self._groups = torch.empty(size, dtype=torch.uint8, device=full.store.device)

    def _new_store(self) -> PlainStore:
        return self._full.store.near(self._room + PADDING)

    def position_of(self, token: int) -> int:
        return token - self.tail_start

    def _put(self, rows: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        each = self._chunk // GROUP
        slotted = self._groups.flatten(0, 1).unflatten(1, (-1, each))  # [rows, slots, groups, bytes]
        most = max(_AT_ONCE // (4 * self._chunk * keys.shape[2]), 1)
        for some in (slice(start, start + most) for start in range(0, len(rows), most)):
            both = (x[some].unflatten(1, (each, GROUP)) for x in (keys, values))
            slotted[rows[some], slots[some]] = quantize_groups(*both, self._kind)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None = None) -> Tensor:
        position = self.position
        q = self.store.append(layer, position + self._held, q, k, v, self.rows_of(layer))
        keys, values = self.store.layer(layer)
        rows, result = slice(0, len(q)), GroupAccumulator(q, len(keys), self._kind)
        if self.tree is None:
            result.attend_exact(rows, keys, values, None, 0, position)
            self.attend_selected(layer, rows, result)
            return result.output(lse)
        at = slice(0, position + len(self.tree))
        sees = self.tree.on(q.device).sees[-len(q) :]
        mask = torch.cat((sees.new_ones((len(q), position)), sees), dim=1)
        part = attend_masked(q, keys[:, at], values[:, at], mask)
        if self.selection.shape[1]:
            self.attend_selected(layer, rows, result)
            part = merge([result.partial(), part])
        if lse is not None:
            lse.copy_(part.lse)
        return part.out.to(q.dtype)

    def attend_selected(self, layer: int, rows: slice, result: GroupAccumulator) -> None:
        """Add a layer's selected chunks, of which every row sees all."""
        result.attend_groups(rows, self._groups[layer], 0, self.selection.shape[1] * self._chunk // GROUP)

    def step_key(self) -> int:
        return self.selection.shape[1]  # which a launch has

    def new_step(self, rows: int) -> QuantizedStep:
        return QuantizedStep(self, rows, self._kind)


class QuantizedStep(StoreStep):
    """A step over a QuantizedCopiedCache: over the tail as it grows, and over the selected chunks."""

    def __init__(self, cache: QuantizedCopiedCache, rows: int, kind: str) -> None:
        super().__init__(cache, cache.store, rows)
        self._selected, self._kind = cache, kind

    def _attend(self, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        result = GroupAccumulator(q, len(keys), self._kind)
        result.attend_growing(keys, values, self._inputs.seen)
        self._selected.attend_selected(layer, slice(0, len(q)), result)
        return result.output()
