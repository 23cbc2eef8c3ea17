"""Pages of keys and values that the stores of several sequences take from one memory, and share."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

import torch

from ..architecture.config import ModelShape
from ..kernels.native.calls import BlockCalls
from ..kernels.native.kernel import Kernel
from ..kernels.native.library import BLOCK
from .host_tensors import host_memory


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
