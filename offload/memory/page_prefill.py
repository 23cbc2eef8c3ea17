"""Passes over more tokens than a page has: prefill.

The keys and values of the layer under way are in one memory on the device. They become pages, and are copied to the
host, while the next layer computes.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..architecture.rope import Rows
from .host_memory import allocator
from .page import PageFormat
from .store import DeviceStore
from .tiers import Tiers
from .tree_attention import Tree


class HostMeanKeys:
    """Mean keys of chunks of `chunk` tokens; without them, a first selection would stream every key.

    Takes `host_mean_key_bytes` (architecture/pages.py) of pinned memory. They are valid up to a position:
    `commit` raises it, `truncate` lowers it.
    """

    def __init__(self, tiers: Tiers[Any], kv_heads: int, head_dim: int, chunk: int) -> None:
        self.chunk = chunk
        self._tiers = tiers
        layers, pages = tiers.pages.shape[:2]
        room = pages * tiers.format.tokens // chunk
        # Chunks come before heads, so that those of a run of tokens are one copy.
        self._means = allocator(tiers.device)((layers, room, kv_heads, head_dim), tiers.open.dtype)
        self._valid = 0  # chunks
        self._tickets: list[Any] = []  # of copies that may not have ended

    def store(self, layer: int, keys: Tensor) -> None:
        """Begin to copy the mean keys of an offloaded layer to the host, from its keys `[kv_heads, tokens, head_dim]`.

        They count from `commit` on.
        """
        link, count = self._tiers.link, keys.shape[1] // self.chunk
        means = torch.empty((count, *self._means.shape[2:]), dtype=keys.dtype, device=keys.device)
        for head, own in enumerate(keys):  # at once, means in fp32 would take as much memory again
            means[:, head] = own[: count * self.chunk].unflatten(0, (-1, self.chunk)).mean(1, dtype=torch.float32)
        self._tickets.append(link.copy([(self._means[layer, :count], means)], link.mark()))

    def pending(self) -> list[Any]:
        """Return the link's tickets since the last call, to wait for or, after an aborted pass, to forget."""
        tickets, self._tickets = self._tickets, []
        return tickets

    def commit(self, tokens: int) -> None:
        """Note that all layers have stored the mean keys of the first `tokens` tokens."""
        self._valid = tokens // self.chunk

    def truncate(self, length: int) -> None:
        """Note that the tokens from position `length` on may change."""
        self._valid = min(self._valid, length // self.chunk)

    def read(self, layer: int, start: int, end: int) -> Tensor:
        """Return the valid mean keys between two positions, `[chunks, kv_heads, head_dim]` in host memory."""
        return self._means[layer, start // self.chunk : min(end // self.chunk, self._valid)]


class PagedPrefill:
    """A pass over tokens up to position `end`, in chunks of up to `chunk` tokens, layer by layer or at once.

    The layer under way has the keys and values of all tokens, committed or not, in `memory`: a store of one layer on
    the device. A chunk attends to them in one call. Just before the next layer overwrites some of them, they become
    pages in a small buffer, which are copied to the host while the chunk computes. Whole pages of committed tokens are
    streamed once a layer. Takes `prefill_bytes` (architecture/pages.py) on the device.

    Tokens of earlier passes, in host memory and in open pages, do not change, except for the page that the pass
    continues, whose copy in its open slot is the valid one until the pass ends.
    """

    def __init__(
        self,
        tiers: Tiers[PageFormat],
        memory: DeviceStore,
        start: int,
        end: int,
        chunk: int,
        means: HostMeanKeys | None,
    ) -> None:
        """`start`: position behind the tokens of earlier passes, the `tiers.num_whole` whole pages among them."""
        page = tiers.format.tokens
        self._tiers, self._memory, self.end, self._means = tiers, memory, end, means
        self._first, self._begun = tiers.num_whole, -(-start // page)
        with torch.inference_mode(False):
            size = (2, -(-chunk // page) + 1, tiers.format.numbers)
            self._buffers = torch.empty(size, dtype=tiers.open.dtype, device=tiers.device).unbind()
        self._tickets: list[Any] = [None, None]  # of the copies from each buffer
        if means is not None:
            means.pending()  # of an aborted pass
        self._layer: int | None = None
        self._finished: int | None = None  # the layer of which pages from number `_saved` on are in `_memory` alone
        self._saved = self._first

    def append(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """Store tokens as in `Store`, in an offloaded layer."""
        if self._layer != layer:
            self._finished, self._layer, self._saved = self._layer, layer, self._first
            self._read_earlier(layer)
        self._save(-(-(start + len(q)) // self._tiers.format.tokens))
        return self._memory.append(0, start, q, k, v, rows)

    def attend(self, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        """Attend as in `Store`, in the layer of the last `append`."""
        assert self._layer is not None
        out = self._memory.attend(0, q, start, tree, lse)
        is_end = start + (len(q) if tree is None else len(tree)) == self.end
        if is_end and self._finished != self._layer:  # once: other layers may attend to the last one, too
            if self._means is not None:
                keys, _ = self._memory.read(0, self.end)
                self._means.store(self._layer, keys[0])
            if self._layer == len(self._tiers.pages) - 1:
                self._finished, self._saved = self._layer, self._first
                self._save(-(-self.end // self._tiers.format.tokens))
        return out

    def _read_earlier(self, layer: int) -> None:
        """Copy the tokens of earlier passes from a layer's pages."""
        tiers = self._tiers
        for page, arrived in tiers.arriving(layer, range(self._first)):
            self._copy_pages(page, tiers.format.plain(arrived).unsqueeze(0), to_memory=True)
        self._save(self._begun)
        for page in range(self._first, self._begun):
            self._copy_pages(page, tiers.open_pages.on_device(layer, page), to_memory=True)

    def _save(self, end: int) -> None:
        """Begin to copy pages of the finished layer to the host, those up to number `end` that have not been."""
        link, layer = self._tiers.link, self._finished
        while layer is not None and self._saved < end:
            first, last = self._saved, min(self._saved + len(self._buffers[0]), end)
            self._wait()
            pages = self._buffers[0][: last - first]
            self._copy_pages(first, pages, to_memory=False)
            writes = self._tiers.pages.writes(range(layer, layer + 1), first, pages.unsqueeze(0))
            self._tickets[0] = link.copy(writes, link.mark())
            self._buffers, self._tickets = self._buffers[::-1], self._tickets[::-1]  # in turn
            self._saved = last

    def _copy_pages(self, first: int, pages: Tensor, to_memory: bool) -> None:
        """Copy pages `[n, numbers]` from number `first` on to the layer's memory, or from it, by two launches."""
        for paged, stored in self._views(first, pages):
            stored.copy_(paged) if to_memory else paged.copy_(stored)

    def _views(self, first: int, pages: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of pages and of the same tokens in the layer's memory, in one shape."""
        format, memory = self._tiers.format, self._memory.layer(0)
        has_blocks = isinstance(memory, Tensor)  # as have the pages then
        paged = (format.parts(pages).transpose(0, 1),) if has_blocks else format.plain_views(pages)
        size = format.tokens // format.least_chunk if has_blocks else format.tokens
        for some, whole in zip(paged, (memory,) if has_blocks else memory, strict=True):
            yield some, whole[:, first * size : (first + len(pages)) * size].view(some.shape)

    def finish(self) -> None:
        """Wait until all pages and mean keys are in host memory. Raises TransferFailed."""
        link, means = self._tiers.link, [] if self._means is None else self._means.pending()
        for ticket in (*means, *self._tickets):
            if ticket is not None:
                link.wait(ticket)
                link.finish(ticket)

    def _wait(self) -> None:
        """Make the device wait until the next buffer has been copied. Raises TransferFailed."""
        ticket, self._tickets[0] = self._tickets[0], None
        if ticket is not None:
            self._tiers.link.wait(ticket)
