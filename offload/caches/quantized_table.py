"""The retrieval cache on a CPU with quantised copies of the selected chunks, which it attends to in place of those."""

from __future__ import annotations

import torch
from torch import Tensor

from ..architecture.kv_formats import BLOCK, GROUP
from ..kernels.native.kv_groups import Groups, kv_format, quantize_call
from ..memory.quantized_groups import GroupMemory
from ..memory.store import append
from .block_table import TableCache
from .full import FullCache
from .selection import Refresh, Selector


class QuantizedTableCache(TableCache):
    """A block table of quantised groups of the selected chunks, and of the tail as it is in the full cache's store.

    A group is quantised when it is selected for the first time, and kept as long as its tokens are in the sequence.
    """

    def __init__(
        self, full: FullCache, selector: Selector, refresh: Refresh, budget: int, chunk: int, tail: int, kind: str
    ) -> None:
        """Make a cache as in `TableCache`, of a format of quantised keys and values; chunks are whole groups."""
        assert chunk % GROUP == 0, "chunks are whole groups"
        super().__init__(full, selector, refresh, budget, chunk, tail)
        shape = full.store.shape
        memory = GroupMemory(shape, full.capacity, kind, full.store.device).memory
        self._groups = [Groups(layer, kv_format(kind)) for layer in memory.unbind()]
        self._known = torch.zeros(memory.shape[:3], dtype=torch.bool)  # which groups are quantised

    def _invalidate(self, unchanged: int) -> bool:
        self._known[:, :, unchanged // GROUP :] = False
        return super()._invalidate(unchanged)

    @property
    def selects_for_free(self) -> bool:
        return False

    def _use(self, chosen: Tensor, chunks: int) -> None:
        super()._use(chosen, chunks)
        quantized = self._blocks[:, :, : self.selection.shape[1] * self._chunk // BLOCK]
        self._quantize(quantized[:, :, :: GROUP // BLOCK] // (GROUP // BLOCK))
        quantized.bitwise_not_()

    def _quantize(self, groups: Tensor) -> None:
        """Quantise those of the groups `[layers, kv_heads, n]` that are not yet."""
        wanted = torch.zeros_like(self._known).scatter_(2, groups.long(), True) & ~self._known
        for layer in wanted.flatten(1).any(1).nonzero().flatten().tolist():
            head, group = wanted[layer].nonzero(as_tuple=True)
            items = torch.stack((head, group * (GROUP // BLOCK), group), dim=1).to(torch.int32)
            call = quantize_call(self._store.layer(layer), self._groups[layer], items, self._store.shape.head_dim)
            self._store.kernel.quantize(call)
        self._known |= wanted

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None = None) -> Tensor:
        q = append(self._store, layer, self.start, q, k, v, self.rows_of(layer), self.stored)
        table, groups = self._table[layer], self._groups[layer]
        return self._store.attend_table(layer, q, table, self.seen, self.tree, lse, groups)
