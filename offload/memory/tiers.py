"""Pages of keys and values over tiers of memory, and the passes over them. What a page contains is its format's.

The tokens of a layer are divided into pages. Whole pages are in host memory or on disk. Each pass attends to some of
them on the device, as they are streamed over the link, and meanwhile to the others on the host. The newest page of
every layer, not yet whole, stays on the device.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..architecture.pages import GATHERED_BYTES
from ..kernels.accumulate import PassResult
from .disk_pages import DiskPages
from .host_attention import Balance, HostAttention, HostResult, add_from_host
from .host_memory import Pinning, allocator, copy_bytes, new_pages
from .link import DISK_COST, LINK_COST, Link
from .open_pages import OpenPages
from .packed_pages import PackedPages
from .page import PageLayout
from .prefetch import PrefetchItem, PrefetchRing, page_runs, prefetch_order

Layout = TypeVar("Layout", bound=PageLayout)


@dataclass(kw_only=True, eq=False)
class Tiers(Generic[Layout]):
    """Pages of some layers over tiers. Every pass is between `begin` and `end`; `truncate` may follow."""

    format: Layout
    link: Link
    ring: PrefetchRing
    run: int  # pages that are copied at once
    balance: Balance
    host: HostAttention | None  # None: every page is streamed
    pages: Tensor | DiskPages | PackedPages  # [layers, pages, numbers] in host memory, or on disk
    open_pages: OpenPages
    pinning: Pinning | None  # of `pages`, which may still be under way
    last_visits: int  # how many of the model's layers attend to the last layer of the store
    prefills_plainly: bool = False  # layer by layer, over plain keys: where pages are not what attention reads best
    num_whole: int = 0  # whole pages before the pass, all in host memory
    num_streamed: int = 0  # of those, how many are streamed; the host attends to the others
    _running: bool = False
    _hosted: Future[HostResult] | None = None  # the last attention on the host
    _staging: Tensor | None = None  # pinned memory for what is gathered; pinning takes long, so it is kept
    _attended: float | None = None  # when the pass's last attention ended, of a layer before this one

    @property
    def open(self) -> Tensor:
        """Return the memory of the open pages `[layers, slots, numbers]`, on the device."""
        return self.open_pages.memory

    @property
    def device(self) -> torch.device:
        return self.open.device

    @property
    def read_cost(self) -> float:
        """Return the estimated time to read a byte in a pass, as in `Store`."""
        pages, share = self.pages, 1.0
        if isinstance(pages, PackedPages):
            pages, share = pages.stored, pages.shape[2] / pages.format.plain_bytes
        return share * (DISK_COST if isinstance(pages, DiskPages) else LINK_COST)

    def prepare(self) -> Iterator[tuple[int, int]]:
        """Wait until the pages are pinned, as in `Store`."""
        return iter(()) if self.pinning is None else self.pinning.progress()

    def begin(self, start: int, rows: int, held: int = 0, slots: int = 0) -> None:
        """Begin a pass as in `Store`, of `rows` tokens at a time; `slots`: pages that must be open at once."""
        self.recover()
        if self.pinning is not None:
            self.pinning.wait()
        self.open_pages.reserve(slots)
        self._running, self.num_whole = True, start // self.format.tokens
        self.num_streamed = self.balance.streamed(self.num_whole, rows) if self.host else self.num_whole
        self.open_pages.advance(start, held)

    def expect(self, visits: int = 1) -> None:
        """Prefetch the pages that are streamed; a layer's are all read `visits` times."""
        self.ring.expect(prefetch_order(self.pages, self.num_streamed, visits, self.last_visits, self.run))

    def recover(self) -> None:
        """Cancel what is left of an aborted pass."""
        if self._running:
            self.ring.reset()
            if self._hosted is not None:  # its thread reads memory that the next pass may replace
                wait((self._hosted,))
            self._running = False

    def end(self) -> None:
        """End the pass, and prefetch for the next one, most likely over the same pages."""
        self.expect()
        self._running, self._hosted, self._attended = False, None, None

    def truncate(self, length: int) -> None:
        """Drop prefetched pages that contain tokens from position `length` on."""
        if length // self.format.tokens < self.num_whole:
            self.ring.drop()

    def close_pages(self) -> None:
        """Move the open pages to host memory, after a pass that may have been interrupted; not to disk."""
        self.recover()
        if isinstance(self.pages, Tensor):
            self.open_pages.flush()

    def parts(
        self,
        layer: int,
        q: Tensor,
        result: PassResult,
        partial: Callable[[int, Tensor, Tensor], Any] | None = None,
    ) -> Iterator[tuple[int, Tensor] | None]:
        """Yield what the caller adds attention to, in order: streamed whole pages, and None for the pages of the pass.

        Of a whole page these are its number and where it was copied to; rotated queries see all of it. Meanwhile the
        host attends to the other whole pages, which are added to `result` here: by `partial`, which returns attention
        of queries to a page in host memory; without it, the format does.
        """
        rest = None if self._attended is None else time.perf_counter() - self._attended
        first = self.num_streamed
        self._hosted = None
        if self.host is not None and first < self.num_whole:
            pages: Any = self.pages[layer, first : self.num_whole]
            self._hosted = self.host.submit(pages, first, q, partial)
        if result.newest == "first":
            yield None
        yield from self.streamed(layer, self.num_streamed)
        if result.newest == "meanwhile":
            yield None
        if self._hosted is not None:
            add_from_host(self._hosted, len(q), rest, self.balance, result)
        if result.newest == "last":
            yield None
        self._attended = time.perf_counter()

    def streamed(self, layer: int, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the first pages of a layer, in the order that is expected: number, and the buffer until the next."""
        for item in page_runs(self.pages, layer, count, self.run):
            buffer, run = self.ring.take(item), item.key[1]
            arrived = self.pages.arrived(layer, run, buffer) if isinstance(self.pages, PackedPages) else buffer
            yield from zip(range(run.start, run.stop), arrived, strict=False)
            self.ring.release(buffer)
            if self.ring.seconds is not None:
                self.balance.observe_link(self.ring.seconds)

    def split(self, start: int, end: int, unit: int = 1) -> Iterator[tuple[int, slice, slice]]:
        """Yield the pages of units of `unit` tokens: number, which units of the page, and which of all."""
        each = self.format.tokens // unit
        for page in range(start // each, -(-end // each)):
            first, last = max(page * each, start), min((page + 1) * each, end)
            yield page, slice(first - page * each, last - page * each), slice(first - start, last - start)

    def to_device(self, x: Tensor) -> Tensor:
        """Copy a tensor from host memory to the device, over the link. Raises TransferFailed."""
        source = x.contiguous()
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        # The mark, because earlier work may still use the target's memory.
        self.link.wait(ticket := self.link.copy([(target, source)], self.link.mark()))
        self.link.finish(ticket)
        return target

    def whole(self, layer: int, first: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Yield whole pages of a layer: number, and a copy on the device. One copy is under way ahead of them.

        The host does not wait. Raises TransferFailed.
        """
        starts = range(first, end, self.run)
        ahead = None
        for start in (*starts, None):
            following = None if start is None else self._begin_copy(layer, start, min(start + self.run, end))
            if ahead is not None:
                number, pages, ticket = ahead
                self.link.wait(ticket)
                if isinstance(self.pages, PackedPages):
                    pages = self.pages.unpacked(layer, slice(number, number + len(pages)), pages)
                yield from enumerate(pages, number)
            ahead = following

    def _begin_copy(self, layer: int, first: int, end: int) -> tuple[int, Tensor, Any]:
        like = self.ring.buffers[0]
        pages = new_pages((end - first, *like.shape[1:]), like.dtype, self.device)
        copies = PrefetchItem((layer, slice(first, end)), self.pages).copies(pages)
        return first, pages, self.link.copy(copies, self.link.mark())

    def on_device(self, x: Tensor) -> Tensor:
        """Return a tensor on the device. Raises TransferFailed."""
        return x if x.device.type == self.device.type else self.to_device(x)

    def pick(self, layer: Tensor, page: Tensor, head: Tensor, grain: Tensor) -> Tensor:
        """Return the newest copies of grains of pages on the device, `[n, count, ...]`. Raises TransferFailed.

        The indices are broadcast to `[n, count]`, and in host memory.
        """
        layer, page, head, grain = where = torch.broadcast_tensors(layer, page, head, grain)
        if isinstance(self.pages, PackedPages):
            picked = self.to_device(self.pages.read_grains(self.link, *where)).unflatten(0, layer.shape)
        elif isinstance(self.pages, DiskPages):
            picked = self.on_device(self.pages.read_grains(self.link, self.format, *where))
        else:
            grains = self.format.grains(self.pages)  # [layers, pages, kv_heads, grains, ...]
            _, pages, heads, each = grains.shape[:4]
            at = ((layer * pages + page) * heads + head) * each + grain
            picked = self.to_device(self._staged(grains.flatten(0, 3), at.flatten())).unflatten(0, at.shape)
        is_open = self.open_pages.contains(page).nonzero(as_tuple=True)
        if len(is_open[0]):
            slots = (layer, page % self.open_pages.slots, head, grain)
            places = tuple(x[is_open].to(self.device) for x in slots)
            picked[tuple(x.to(self.device) for x in is_open)] = self.format.grains(self.open)[places]
        return picked

    def load(self, first: int, kv: Tensor, grain: int) -> None:
        """Store grains `[layers, kv_heads, n, ...]` of `grain` tokens from number `first` on, in host memory."""
        self.close_pages()
        for page, inside, some in self.split(first, first + kv.shape[2], grain):
            is_whole = (inside.stop - inside.start) * grain == self.format.tokens
            copy_bytes(self.format.grains(self.open_pages.edited(page, is_whole))[:, :, inside], kv[:, :, some])

    def dump(self, first: int, end: int, grain: int) -> Tensor:
        """Return grains `[layers, kv_heads, n, ...]` of `grain` tokens in host memory, from number `first` on."""
        pages = self.split(first, end, grain)
        newest = ((self.open_pages.newest(page).cpu(), inside) for page, inside, _ in pages)
        return torch.cat([self.format.grains(page)[:, :, inside] for page, inside in newest], dim=2)

    def _staged(self, x: Tensor, at: Tensor) -> Tensor:
        """Copy rows `at` of `x` to pinned memory that is kept: pageable memory is copied slowly.

        The copy is valid until the next call.
        """
        shape = (len(at), *x.shape[1:])
        nbytes = torch.Size(shape).numel() * x.itemsize
        if self._staging is None or self._staging.nbytes < nbytes:
            self._staging = None  # free it first
            self._staging = allocator(self.device)((max(nbytes, GATHERED_BYTES),), torch.uint8)
        return torch.index_select(x, 0, at, out=self._staging[:nbytes].view(x.dtype).view(shape))
