"""Pages of keys and values over tiers of memory, and the passes over them. What a page contains is its format's.

The tokens of a layer are divided into pages. Whole pages are in host memory or on disk. Each pass attends to some of
them on the device, as they are streamed over the link, and meanwhile to the others on the host. The newest page of
every layer, not yet whole, stays on the device.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..kernels.accumulate import PassResult
from .host_attention import Balance, HostAttention, HostResult, add_from_host
from .host_memory import Pinning, copy_bytes
from .link import Link, copy_now
from .open_pages import OpenPages
from .page import PageLayout
from .pages import Pages, streamed, streamed_in_pass
from .prefetch import PrefetchRing

Layout = TypeVar("Layout", bound=PageLayout)


@dataclass(kw_only=True, eq=False)
class Tiers(Generic[Layout]):
    """Pages of some layers over tiers. Every pass is between `begin` and `end`; `truncate` may follow."""

    format: Layout
    link: Link
    ring: PrefetchRing
    together: int  # pages that are copied at once
    balance: Balance
    host: HostAttention | None  # None: every page is streamed
    pages: Pages  # whole ones
    open_pages: OpenPages
    pinning: Pinning | None  # of `pages`, which may still be under way
    last_visits: int  # how many of the model's layers attend to the last layer of the store
    num_whole: int = 0  # whole pages before the pass, all on the host
    num_streamed: int = 0  # of those, how many are streamed; the host attends to the others
    _running: bool = False
    _hosted: Future[HostResult] | None = None  # the last attention on the host
    _attended: float | None = None  # when the pass's last attention ended, of a layer before this one

    @property
    def open(self) -> Tensor:
        """Return the memory of the open pages `[layers, slots, numbers]`, on the device."""
        return self.open_pages.memory

    @property
    def device(self) -> torch.device:
        return self.open.device

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
        order = streamed_in_pass(self.pages, self.num_streamed, visits, self.last_visits, self.together)
        self.ring.expect(order)

    def recover(self) -> None:
        """Cancel the copies and the host attention of an aborted pass."""
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
        if self.pages.is_writable:
            self.open_pages.flush()

    def attend(self, layer: int, q: Tensor, result: PassResult) -> Iterator[tuple[int, Tensor] | None]:
        """Yield what the caller adds attention to, in order: streamed whole pages, and None for the pages of the pass.

        A whole page is its number and what has arrived; rotated queries see all of it. Meanwhile the host attends to
        the other whole pages, which are added to `result` here.
        """
        rest = None if self._attended is None else time.perf_counter() - self._attended
        first = self.num_streamed
        self._hosted = None
        if self.host is not None and first < self.num_whole:
            pages = self.pages.for_host(layer, slice(first, self.num_whole))
            self._hosted = self.host.submit(pages, q)
        if result.newest == "first":
            yield None
        yield from self.arriving(layer, range(first))
        if result.newest == "meanwhile":
            yield None
        if self._hosted is not None:
            add_from_host(self._hosted, len(q), rest, self.balance, result)
        if result.newest == "last":
            yield None
        self._attended = time.perf_counter()

    def arriving(self, layer: int, which: range) -> Iterator[tuple[int, Tensor]]:
        """Yield pages of a layer as they arrive: number, and the page until the next one. Raises TransferFailed.

        They are prefetched if they were expected in this order.
        """
        for item in streamed(self.pages, layer, which, self.together):
            buffer = self.ring.take(item)
            _, run = item.key
            yield from enumerate(self.pages.arrived(layer, run, buffer), run.start)
            self.ring.release(buffer)
            if self.ring.seconds is not None:
                self.balance.observe_link(self.ring.seconds)

    def fetched(self, layer: int, which: range) -> Iterator[tuple[int, Tensor]]:
        """Yield pages of a layer as `arriving`, between two passes: they are prefetched in place of the next pass's."""
        self.recover()
        self._running = True  # until done: after an interrupt, a buffer would not be free
        self.ring.expect(streamed(self.pages, layer, which, self.together))
        yield from self.arriving(layer, which)
        self._running = False

    def split(self, start: int, end: int, size: int = 1) -> Iterator[tuple[int, slice, slice]]:
        """Yield the pages of parts of `size` tokens: number, which parts of the page, and which of all."""
        count = self.format.tokens // size
        for page in range(start // count, -(-end // count)):
            first, last = max(page * count, start), min((page + 1) * count, end)
            yield page, slice(first - page * count, last - page * count), slice(first - start, last - start)

    def to_device(self, x: Tensor) -> Tensor:
        """Copy a tensor from host memory to the device, over the link. Raises TransferFailed."""
        source = x.contiguous()
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        copy_now(self.link, [(target, source)])  # behind earlier work, which may still use the target's memory
        return target

    def gather(self, layer: Tensor, page: Tensor, head: Tensor, at: Tensor) -> Tensor:
        """Return the newest copies of parts of pages on the device, `[n, count, ...]`. Raises TransferFailed.

        The indices are broadcast to `[n, count]`, and in host memory.
        """
        layer, page, head, at = torch.broadcast_tensors(layer, page, head, at)
        flat = [x.flatten() for x in (layer, page, head, at)]
        picked = self.to_device(self.pages.gather(flat[0], flat[1], flat[2], flat[3], self.link))
        picked = picked.unflatten(0, layer.shape)
        is_open = self.open_pages.contains(page).nonzero(as_tuple=True)
        if len(is_open[0]):
            slots = (layer, page % self.open_pages.slots, head, at)
            places = tuple(x[is_open].to(self.device) for x in slots)
            picked[tuple(x.to(self.device) for x in is_open)] = self.format.parts(self.open)[places]
        return picked

    def load(self, first: int, kv: Tensor, size: int) -> None:
        """Store parts `[layers, kv_heads, n, ...]` of `size` tokens from number `first` on, in host memory."""
        self.close_pages()
        for page, inside, some in self.split(first, first + kv.shape[2], size):
            is_whole = (inside.stop - inside.start) * size == self.format.tokens
            copy_bytes(self.format.parts(self.open_pages.edited(page, is_whole))[:, :, inside], kv[:, :, some])

    def dump(self, first: int, end: int, size: int) -> Tensor:
        """Return parts `[layers, kv_heads, n, ...]` of `size` tokens in host memory, from number `first` on."""
        pages = self.split(first, end, size)
        newest = ((self.open_pages.newest(page).cpu(), inside) for page, inside, _ in pages)
        return torch.cat([self.format.parts(page)[:, :, inside] for page, inside in newest], dim=2)
