"""Keys and values in pages of a pool, found by a block table. Sequences share the pages of a common beginning."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.native.library import BLOCK
from .block_store import BlockStore
from .page_pool import PagePool
from .tree_attention import Tree


class PagedStore(BlockStore):
    """A store for up to `capacity` tokens whose blocks are pages of a pool, all taken at once.

    Shared pages are copied when they are written to.
    """

    def __init__(self, pool: PagePool, capacity: int, beginning: PagedStore | None = None, tokens: int = 0) -> None:
        """Share the pages of the first `tokens` tokens of another store, the `beginning`, which has run them.

        The last page is copied if both stores will write to it: later there may be no page left for the copy.
        """
        self._set_memory(pool.kernel, pool.shape, pool.dtype, pool.blocks, pool.calls)
        whole, has_part = divmod(tokens, BLOCK)
        shared = beginning._pages[:whole] if whole else []
        pool.share(shared)
        self._pool = pool
        self._pages = [*shared, *pool.allocate(pages_for(capacity) - whole)]
        if has_part:
            pool.blocks[:, :, self._pages[whole]] = pool.blocks[:, :, beginning._pages[whole]]
        self._count = len(self._pages)
        self._table = torch.tensor(self._pages, dtype=torch.int32)
        self._placed: dict[int, Tensor] = {}

    def release(self) -> None:
        """Give all pages back; the store must not be used afterwards."""
        pages, self._pages = self._pages, []
        self._pool.free(pages)

    def begin(self, start: int, tokens: int, chunk: int | None = None, held: int = 0) -> None:
        for block in range(start // BLOCK, -(-(start + tokens) // BLOCK)):
            if self._pool.is_shared(self._pages[block]):
                self._pages[block] = self._pool.copy(self._pages[block])
                self._table[block] = self._pages[block]

    def append(
        self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: tuple[Tensor, Tensor], stored: int = 0
    ) -> Tensor:
        return self._append(layer, start, q, k, v, rows, stored, self._table)

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        return self._attend(layer, q, start + 1, self._rows, tree, lse=lse)

    def observe(self, layer: int, q: Tensor, start: int, lse: Tensor, received: Tensor) -> None:
        blocks = self._layers[layer]
        self._kernel.observe(self._calls.observation(blocks, q, start + 1, lse, received, self._rows))

    @property
    def _rows(self) -> Tensor:
        """The block table of each KV head, in one memory."""
        return self._table.expand(self.shape.kv_heads, -1)

    def places(self, blocks: Tensor, position: int) -> Tensor:
        """Return a table for `attend_table`, in the same memory for the same `blocks`, for recorded passes."""
        placed = self._placed.get(blocks.data_ptr())
        if placed is None or placed.shape != blocks.shape:
            if len(self._placed) > 4:  # tables of selections that are gone
                self._placed.clear()
            placed = self._placed[blocks.data_ptr()] = torch.empty_like(blocks)
        inside = blocks.flatten().clamp_(max=self._count - 1)  # no token is ever in the others
        torch.index_select(self._table, 0, inside, out=placed.view(-1))
        return placed

    def load(self, start: int, kv: Tensor) -> None:
        tokens = kv.shape[2] * BLOCK
        assert start % BLOCK == 0, "tokens are copied in whole blocks"
        self.begin(start, tokens)
        self._blocks[:, :, self._numbers(start // BLOCK, (start + tokens) // BLOCK)] = kv

    def _numbers(self, first: int, last: int) -> Tensor:
        return self._table[first:last]

    def _places_of(self, positions: Tensor) -> Tensor:
        return self._table[positions // BLOCK] * BLOCK + positions % BLOCK


def pages_for(tokens: int) -> int:
    """Return how many pages so many tokens take."""
    return -(-tokens // BLOCK)
