"""The retrieval cache on a CPU: a block table over the full cache's blocks, attended to in place, without a copy."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ..kernels.native.library import BLOCK
from ..kernels.native.recording import PassInputs
from ..memory.block_store import BlockStore
from ..memory.quantized_store import QuantizedStore
from ..memory.store import append
from ..memory.tree_attention import Tree
from .full import FullCache
from .selection import Refresh, Selector
from .table_base import InPlaceCache


def blocks_of(chunks: Tensor, each: int, first: int, end: int) -> Tensor:
    """Return the blocks of chunks `[rows, chunks]`, `each` of one, and behind them those from `first` to `end` - 1."""
    blocks = (chunks.unsqueeze(-1) * each + torch.arange(each)).flatten(1)
    return torch.cat((blocks, torch.arange(first, end).expand(len(chunks), -1)), dim=1)


class TableCache(InPlaceCache):
    """A table of the block numbers of the selected chunks and of the tail."""

    def __init__(
        self, full: FullCache, selector: Selector, refresh: Refresh, budget: int, chunk: int, tail: int
    ) -> None:
        """Make a cache as in `SelectedCache`; chunks are whole blocks, and the full cache's store is one of blocks."""
        assert chunk % BLOCK == 0, "chunks are whole blocks"
        super().__init__(full, selector, refresh, budget, chunk, tail)
        self._store: BlockStore | QuantizedStore = full.store
        self._blocks = torch.empty(0, dtype=torch.int32)  # [layers, kv_heads, blocks]
        self._table = self._blocks  # of the pass: their places in the store
        self.selection = torch.empty((full.store.shape.layers * full.store.shape.kv_heads, 0), dtype=torch.long)

    def _use(self, chosen: Tensor, chunks: int) -> None:
        each, start, shape = self._chunk // BLOCK, chunks * self._chunk, self._store.shape
        self.selection = chosen.sort(dim=-1).values
        table = blocks_of(self.selection, each, start // BLOCK, -(-(start + self._room) // BLOCK))
        table = table.view(shape.layers, shape.kv_heads, -1)
        if self._blocks.shape != table.shape:  # else it stays where it is, for recorded passes
            self._blocks = torch.empty(table.shape, dtype=torch.int32)
        self._blocks.copy_(table)

    def begin(self, tokens: int, tree: Tree | None = None) -> None:
        super().begin(tokens, tree)
        self._table = self._store.places(self._blocks, self._length)

    @property
    def is_recordable(self) -> bool:
        return self._store.is_recordable

    def begin_recorded(self, tokens: int, tree: Tree | None = None) -> tuple[Hashable, PassInputs]:
        """Begin a pass as in `RecordableCache`."""
        self.begin(tokens, tree)
        parents = None if tree is None else tree.on(self._store.device).parents
        key = self._table.data_ptr(), self._table.shape, tree is None
        return key, PassInputs(self.start, self.seen, self.rows, self.stored, parents)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None = None) -> Tensor:
        q = append(self._store, layer, self.start, q, k, v, self.rows_of(layer), self.stored)
        return self._store.attend_table(layer, q, self._table[layer], self.seen, self.tree, lse)
