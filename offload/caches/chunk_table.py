"""The retrieval cache on a GPU that holds the whole KV cache: Triton's kernel reads the selected chunks from there."""

import torch
from torch import Tensor

from ..kernels.attention import Partial, attend_masked, merge
from ..kernels.triton import ROWS
from ..kernels.triton.accumulate import attend_table, attend_table_before
from ..memory.plain_store import PlainStore
from ..memory.store import append
from ..memory.tree_attention import Tree
from .selected import InPlaceCache
from .static_step import StoreStep


class ChunkTableCache(InPlaceCache):
    """A table of the numbers of the selected chunks; the tail follows from its position."""

    has_static_steps = True

    def _allocate(self) -> None:
        store, shape = self._full.store, self._full.store.shape
        assert isinstance(store, PlainStore)
        self.store = store
        size = (shape.layers, shape.kv_heads, self._slots)
        self.table = torch.zeros(size, dtype=torch.int32, device=store.device)  # the first of them are used
        self.lengths = torch.zeros(3, dtype=torch.long, device=store.device)  # of a recorded step; `seen` comes first

    def _use(self, chosen: Tensor, chunks: int) -> None:
        used = chosen.shape[1]
        self.selection = chosen.sort(dim=-1).values
        self.table[:, :, :used] = self.selection.view(*self.table.shape[:2], used)
        self.lengths[1:2].fill_(used)
        self.lengths[2:].fill_(chunks * self.chunk)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, lse: Tensor | None = None) -> Tensor:
        assert lse is None, "models with sinks copy their chunks"
        q = append(self.store, layer, self.start, q, k, v, self.rows_of(layer), self.stored)
        keys, values = self.store.layer(layer)
        table = self.table[layer, :, : self.selection.shape[1]]
        if self.tree is not None:
            return self._attend_tree(q, keys, values, table, self.tree)
        parts = [
            attend_table(part, keys, values, table, self.chunk, (self.seen + index * ROWS, self.tail_start))
            for index, part in enumerate(q.split(ROWS))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_tree(self, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, tree: Tree) -> Tensor:
        at = slice(self.length, self.start + len(q))
        own = attend_masked(q, keys[:, at], values[:, at], tree.on(q.device).sees[-len(q) :])
        if self.seen == 1:
            return own.out.to(q.dtype)
        lengths = (self.seen - 1, self.tail_start)
        parts = [attend_table_before(part, keys, values, table, self.chunk, lengths) for part in q.split(ROWS)]
        return merge([Partial(*map(torch.cat, zip(*parts, strict=True))), own]).out

    def unused(self, rows: int) -> int:
        """Return the first position behind the full cache's tokens and a pass of so many rows."""
        return max(self.length + rows, self._full.length)

    def fits(self, rows: int) -> bool:
        return self.unused(rows) < self._full.capacity

    def begin_padded(self, tokens: int, rows: int) -> None:
        assert self.fits(rows), f"{rows} rows behind {self.length} tokens"
        self.begin(tokens)

    def step_key(self) -> None:
        return None

    def new_step(self, rows: int) -> StoreStep:
        return ChunkTableStep(self, rows)

    def clear(self) -> None:
        """Do nothing: the kernel reads no key that is not seen, and the store is the full cache's."""


class ChunkTableStep(StoreStep):
    """A step over a ChunkTableCache. Rows of tokens that the full cache has are stored where nobody reads them."""

    _cache: ChunkTableCache

    def __init__(self, cache: ChunkTableCache, rows: int) -> None:
        super().__init__(cache, cache.store, rows, capacity=0)
        self._rows = rows

    def load(self) -> None:
        cache, inputs = self._cache, self._inputs
        inputs.load(cache.length, cache.rows)
        if cache.ahead:
            inputs.positions[: cache.ahead].fill_(cache.unused(self._rows))
        cache.lengths[:1].fill_(cache.seen)

    def load_ahead(self) -> None:
        cache, inputs = self._cache, self._inputs
        inputs.load(0, inputs.angles)
        inputs.positions.fill_(cache.unused(self._rows))
        cache.lengths[:1].fill_(1)

    def _attend(self, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        cache = self._cache
        return attend_table(q, keys, values, cache.table[layer], cache.chunk, cache.lengths)
