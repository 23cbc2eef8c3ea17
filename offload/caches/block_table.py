"""The retrieval cache on a CPU: a block table over the full cache's blocks, attended to in place, without a copy."""

from typing import Any

import torch
from torch import Tensor

from ..architecture.kv_formats import BLOCK
from ..memory.block_store import BlockStore
from ..memory.store import append
from ..memory.tree_attention import Tree
from ..settings.method_sizes import KEPT_QUERIES
from .selected import InPlaceCache


def blocks_of(chunks: Tensor, each: int, first: int, end: int) -> Tensor:
    """Return the blocks of chunks `[rows, chunks]`, `each` of one, and behind them those from `first` to `end` - 1."""
    blocks = (chunks.unsqueeze(-1) * each + torch.arange(each)).flatten(1)
    return torch.cat((blocks, torch.arange(first, end).expand(len(chunks), -1)), dim=1)


class TableCache(InPlaceCache):
    """A table of the block numbers of the selected chunks and of the tail."""

    def _allocate(self) -> None:
        """Chunks are whole blocks, and the full cache's store is one of blocks."""
        assert self.chunk % BLOCK == 0, "chunks are whole blocks"
        self._store: Any = self._full.store  # BlockStore or QuantizedStore
        self._blocks = torch.empty(0, dtype=torch.int32)  # [layers, kv_heads, blocks]
        self._table = self._blocks  # of the pass: their places in the store

    def _use(self, chosen: Tensor, chunks: int) -> None:
        each, start, shape = self.chunk // BLOCK, chunks * self.chunk, self._store.shape
        self.selection = chosen.sort(dim=-1).values
        table = blocks_of(self.selection, each, start // BLOCK, -(-(start + self._room) // BLOCK))
        table = table.view(shape.layers, shape.kv_heads, -1)
        self._blocks = table.to(torch.int32)

    def begin(self, tokens: int, tree: Tree | None = None) -> None:
        super().begin(tokens, tree)
        self._table = self._store.places(self._blocks, self.length)

    def native_sequence(self) -> Any:
        """Return the part of a pass as `FullCache.native_sequence`."""
        store, has_others = self._store, self.windows is not None or self.states is not None
        if not isinstance(store, BlockStore) or has_others or self._inflight > KEPT_QUERIES:
            return None
        stored, table = self.stored, self._table
        return store.sequence(self._inflight, self.start, self.seen, self.rows, self.tree, stored, table)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, lse: Tensor | None = None) -> Tensor:
        q = append(self._store, layer, self.start, q, k, v, self.rows_of(layer), self.stored)
        return self._store.attend_table(layer, q, self._table[layer], self.seen, self.tree, lse)
