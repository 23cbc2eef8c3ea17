"""Prefill passes: device buffers for more tokens than a page has.

A layer's keys and values stay on the device while it computes. They are copied to the host while the next layer
computes.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.rope import Rows
from .host_memory import allocator
from .page import PageFormat, PageRun
from .plain_store import PlainStore
from .tiers import Tiers


class PrefillBuffers:
    """Buffers for the pages of a pass, up to position `end`, of two layers at a time.

    Takes `paged_prefill_bytes` (architecture/pages.py) on the device. The first `begun` pages have tokens:
    committed ones, or those of a tree in flight. They are copied from the pages' open slots, which do not change, so an
    aborted pass leaves all these tokens intact; or from the host, if an earlier pass over the tree was of this kind.
    """

    def __init__(self, tiers: Tiers[PageFormat], end: int, begun: int) -> None:
        self._tiers, self._first, self._begun = tiers, tiers.num_whole, begun
        size = (2, -(-end // tiers.format.tokens) - self._first, tiers.format.numbers)
        with torch.inference_mode(False):
            self._buffers = torch.empty(size, dtype=tiers.open.dtype, device=tiers.device)
        self._layers: list[int | None] = [None, None]  # the layer whose pages are in each set
        self._tickets: list[Any] = [None, None]

    def buffer(self, layer: int, page: int) -> Tensor:
        side = layer % 2
        if self._layers[side] != layer:
            self._wait(side)
            self._layers[side] = layer
            for index in range(self._begun):
                self._fill(self._buffers[side, index], layer, self._first + index)
        return self._buffers[side, page - self._first]

    def _fill(self, buffer: Tensor, layer: int, page: int) -> None:
        if page in self._tiers.open_pages:
            buffer.copy_(self._tiers.open_pages.buffer(layer, page))
            return
        self._tiers.pages.read(range(layer, layer + 1), page, buffer.unsqueeze(0), self._tiers.link)

    def run(self, layer: int, pages: range) -> PageRun:
        """Return pages of the current layer, the first one of the pass among them."""
        return PageRun(self._buffers[layer % 2], tuple(page - self._first for page in pages))

    def store(self, layer: int) -> None:
        """Begin to copy the pages of a finished layer to the host, once: other layers may attend to it, too."""
        link, side = self._tiers.link, layer % 2
        if self._tickets[side] is not None:
            return
        pages = self._buffers[side].unsqueeze(0)
        writes = self._tiers.pages.writes(range(layer, layer + 1), self._first, pages)
        self._tickets[side] = link.copy(writes, link.mark())

    def finish(self) -> None:
        """Wait until all pages are in host memory."""
        for side in range(2):
            self._wait(side)

    def _wait(self, side: int) -> None:
        link, ticket = self._tiers.link, self._tickets[side]
        if ticket is not None:
            link.wait(ticket)
            link.finish(ticket)
            self._tickets[side] = None


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


class PlainPrefill:
    """A pass layer by layer, in which the layer under way has plain keys and values of all tokens, committed or not.

    A chunk attends to them in one call. Just before the next layer overwrites some of them, they become pages in a
    small buffer, which are copied to the host while the chunk computes. Whole pages of committed tokens are streamed
    once a layer. Takes `plain_prefill_bytes` (architecture/pages.py) on the device.

    Committed tokens in host memory and in open pages do not change, except for the page that the pass continues, whose
    copy in its open slot is the valid one until the pass ends.
    """

    def __init__(
        self,
        tiers: Tiers[PageFormat],
        shape: ModelShape,
        dtype: torch.dtype,
        start: int,
        end: int,
        chunk: int,
        means: HostMeanKeys | None,
    ) -> None:
        page = tiers.format.tokens
        self._tiers, self._end, self._means = tiers, end, means
        self._first, self._begun = start // page, start % page > 0
        self._count = -(-end // page)
        with torch.inference_mode(False):
            self._plain = PlainStore(replace(shape, layers=1), self._count * page, dtype, tiers.device)
            size = (2, -(-chunk // page) + 1, tiers.format.numbers)
            self._buffers = torch.empty(size, dtype=tiers.open.dtype, device=tiers.device).unbind()
        self._tickets: list[Any] = [None, None]  # of the copies from each buffer
        if means is not None:
            means.pending()  # of an aborted pass
        self._layer: int | None = None
        self._finished: int | None = None  # the layer before, of which pages from number `_saved` on are only plain
        self._saved = self._first

    def append(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """Store tokens as in `Store`, in an offloaded layer."""
        if self._layer != layer:
            self._finished, self._layer, self._saved = self._layer, layer, self._first
            self._read_committed(layer)
        self._save(-(-(start + len(q)) // self._tiers.format.tokens))
        return self._plain.append(0, start, q, k, v, rows)

    def attend(self, q: Tensor, start: int, lse: Tensor | None = None) -> Tensor:
        """Attend as in `Store`, in the layer of the last `append`."""
        assert self._layer is not None
        out = self._plain.attend(0, q, start, lse=lse)
        if start + len(q) == self._end:
            if self._means is not None:
                keys, _ = self._plain.layer(0)
                self._means.store(self._layer, keys[:, : self._end])
            if self._layer == len(self._tiers.pages) - 1:
                self._finished, self._saved = self._layer, self._first
                self._save(self._count)
        return out

    def _read_committed(self, layer: int) -> None:
        """Copy the committed tokens of a layer from its pages."""
        tiers = self._tiers
        for page, arrived in tiers.arriving(layer, range(self._first)):
            self._copy_pages(page, tiers.format.plain(arrived).unsqueeze(0), to_plain=True)
        if self._begun:
            self._save(self._first + 1)
            self._copy_pages(self._first, tiers.open[layer, self._first % 2].unsqueeze(0), to_plain=True)

    def _save(self, end: int) -> None:
        """Begin to copy pages of the finished layer to the host, those up to number `end` that have not been."""
        link, layer = self._tiers.link, self._finished
        while layer is not None and self._saved < end:
            first, last = self._saved, min(self._saved + len(self._buffers[0]), end)
            self._wait()
            pages = self._buffers[0][: last - first]
            self._copy_pages(first, pages, to_plain=False)
            writes = self._tiers.pages.writes(range(layer, layer + 1), first, pages.unsqueeze(0))
            self._tickets[0] = link.copy(writes, link.mark())
            self._buffers, self._tickets = self._buffers[::-1], self._tickets[::-1]  # in turn
            self._saved = last

    def _copy_pages(self, first: int, pages: Tensor, to_plain: bool) -> None:
        """Copy pages `[n, numbers]` from number `first` on to plain keys and values, or from them: two launches."""
        page = self._tiers.format.tokens
        at = slice(first * page, (first + len(pages)) * page)
        for paged, plain in zip(self._tiers.format.plain_views(pages), self._plain.layer(0), strict=True):
            some = plain[:, at].view(paged.shape)
            some.copy_(paged) if to_plain else paged.copy_(some)

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
