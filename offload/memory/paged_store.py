"""Keys and values in blocks of a pool, found by a block table. Sequences share the blocks of a common beginning."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..kernels.native.calls import BlockCalls
from ..kernels.native.kernel import Kernel
from ..kernels.native.structs import BLOCK
from .block_store import BlockStore
from .host_memory import host_memory


class PagePool:
    """Pages of 16 tokens, each a block of every layer and KV head. A page belongs to one store or more.

    Memory is committed when a page is first written to, and then kept for the next store.
    """

    def __init__(self, kernel: Kernel, shape: ModelShape, pages: int, dtype: torch.dtype) -> None:
        self.kernel, self.shape, self.dtype = kernel, shape, dtype
        self.calls = BlockCalls(shape, pages)
        self.blocks = host_memory((shape.layers, shape.kv_heads, pages, 2 * BLOCK * shape.head_dim), dtype)
        self.layers = self.blocks.unbind()
        self._free = list(range(pages))  # a heap: neighbours are read faster than scattered pages
        self._users: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Number of pages that no store has."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return pages for one store. There must be as many."""
        assert count <= self.num_free, f"{count} pages of {self.num_free}"
        taken = [heappop(self._free) for _ in range(count)]
        self._users.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Give pages to another store as well."""
        for page in pages:
            self._users[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Free a store's pages; those of other stores too stay theirs."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                heappush(self._free, page)

    def is_shared(self, page: int) -> bool:
        """Return whether more than one store has a page."""
        return self._users[page] > 1

    def copy(self, page: int) -> int:
        """Return a new page with the contents of a shared one, which is given back."""
        (new,) = self.allocate(1)
        self.blocks[:, :, new] = self.blocks[:, :, page]
        self.free([page])
        return new


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
        shared: list[int] = beginning._pages[:whole] if beginning is not None else []
        pool.share(shared)
        self._pool = pool
        self._pages: list[int] = [*shared, *pool.allocate(pages_for(capacity) - whole)]
        if has_part and beginning is not None:
            pool.blocks[:, :, self._pages[whole]] = pool.blocks[:, :, beginning._pages[whole]]
        self._table = torch.tensor(self._pages, dtype=torch.int32)
        self._rows = self._table.expand(self.shape.kv_heads, -1)

    def release(self) -> None:
        """Give all pages back; the store must not be used afterwards."""
        pages, self._pages = self._pages, []
        self._pool.free(pages)

    def begin(self, start: int, tokens: int, chunk: int | None = None, held: int = 0) -> None:
        for block in range(start // BLOCK, -(-(start + tokens) // BLOCK)):
            if self._pool.is_shared(self._pages[block]):
                self._pages[block] = self._pool.copy(self._pages[block])
                self._table[block] = self._pages[block]

    def places(self, blocks: Tensor, position: int) -> Tensor:
        inside = blocks.clamp_(max=len(self._table) - 1)  # no token is ever in the others
        return self._table[inside]

    def load(self, start: int, kv: Tensor) -> None:
        self.begin(start, kv.shape[2] * BLOCK)
        super().load(start, kv)

    def _numbers(self, first: int, last: int) -> Tensor:
        return self._table[first:last]

    def _places_of(self, positions: Tensor) -> Tensor:
        return self._table[positions // BLOCK] * BLOCK + positions % BLOCK


def pages_for(tokens: int) -> int:
    """Return how many pages so many tokens take."""
    return -(-tokens // BLOCK)
