"""Passes over tiers of quantised keys and values: what is the same whichever kernel attends.

The device has the bf16 tokens of the sink and of the newest windows, the groups of the first layers, and those of the
pages that a pass writes to. Of the whole pages before it, every pass streams some once a layer, and attends to the
others in host memory meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait

import torch
from torch import Tensor

from ..architecture.kv_formats import GROUP
from .balance import Stopwatch
from .disk_pages import DiskPages
from .host_attention import HostResult
from .link import DISK_COST, LINK_COST
from .open_pages import OpenPages
from .prefetch import PrefetchItem, prefetch_order
from .quantized_memory import QuantizedMemory
from .tiers import QuantizedTiers


class QuantizedPasses(QuantizedMemory):
    """The first base of a store over tiers; the second one attends in one memory. Passes are between `begin`, `end`."""

    def _use_tiers(self, tiers: QuantizedTiers) -> None:
        """Set the tiers, once the base has its own memory."""
        self.tiers, self.span = tiers, tiers.format.tokens
        self.open_pages = OpenPages(tiers)
        self._num_whole = 0  # whole pages before the pass
        self._num_streamed = 0  # of those, how many are streamed; the host attends to the others
        self._hosted: Future[HostResult] | None = None  # the last attention on the host
        self._clock = Stopwatch()
        self._running = False

    @property
    def resident_layers(self) -> int:
        return self.tiers.resident_layers

    @property
    def read_cost(self) -> float:
        return DISK_COST if isinstance(self.tiers.pages, DiskPages) else LINK_COST

    def prepare(self) -> Iterator[tuple[int, int]]:
        return iter(()) if self.tiers.pinning is None else self.tiers.pinning.progress()

    def begin(self, start: int, tokens: int, chunk: int | None = None, held: int = 0) -> None:
        """Begin a pass as in `Store`, and prefetch its first pages."""
        assert chunk is None, "a prompt is read chunk by chunk"
        self._recover()
        if self.tiers.pinning is not None:
            self.tiers.pinning.wait()
        super().begin(start, tokens, chunk, held)
        first, last = start // self.span, (start + tokens - 1) // self.span
        self._reserve(last - first + 1)
        self._running, self._num_whole = True, first
        self._num_streamed = self.tiers.balance.streamed(first, tokens) if self.tiers.host else first
        self.open_pages.advance(start, held)
        for page in range(first, last + 1):
            self.open_pages.open(page)
        self._expect()

    def _expect(self) -> None:
        self.tiers.ring.expect(prefetch_order(self.tiers.pages, self._num_streamed, 1, self.tiers.last_visits))

    def _reserve(self, pages: int) -> None:
        """Have slots for so many open pages."""
        if pages > self.open_pages.slots:
            self.open_pages.flush()
            layers, _, numbers = self.tiers.open.shape
            self.tiers.open = self.tiers.new_memory((layers, pages, numbers))
            self.open_pages = OpenPages(self.tiers)

    def _recover(self) -> None:
        """Cancel what is left of an aborted pass."""
        if self._running:
            self.tiers.ring.reset()
            if self._hosted is not None:  # its thread reads memory that the next pass may replace
                wait((self._hosted,))
            self._running = False

    def end(self) -> None:
        """End the pass, and prefetch for the next one, most likely over the same pages."""
        self._clock.stop()
        self._expect()
        self._running = False

    def truncate(self, length: int) -> None:
        super().truncate(length)
        if length // self.span < self._num_whole:
            self.tiers.ring.drop()

    def _close_pages(self) -> None:
        """Move the open pages to host memory, after a pass that may have been interrupted; not to disk."""
        self._recover()
        self.tiers.ring.drop()
        if isinstance(self.tiers.pages, Tensor):
            self.open_pages.flush()

    def _streamed(self, layer: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the pages of an offloaded layer that are streamed: number, and the buffer, valid until the next one."""
        tiers = self.tiers
        for page in range(self._num_streamed):
            buffer = tiers.ring.take(PrefetchItem((layer - self.resident_layers, page), tiers.pages))
            yield page, buffer
            tiers.ring.release(buffer)
            if tiers.ring.seconds is not None:
                tiers.balance.observe_link(tiers.ring.seconds)

    def _on_host(self, layer: int) -> Tensor | None:
        """Return the whole pages of an offloaded layer that are not streamed, in host memory; None if there are none.

        They are those from number `_num_streamed` on.
        """
        if self._num_streamed == self._num_whole:
            return None
        return self.tiers.pages[layer - self.resident_layers, self._num_streamed : self._num_whole]

    def _pages_of(self, groups: range) -> Iterator[tuple[int, range, slice]]:
        """Yield the pages of groups of the sequence: number, which groups of the page, and which of the groups."""
        each = self.span // GROUP
        for page in range(groups.start // each, -(-groups.stop // each)):
            first, stop = max(groups.start, page * each), min(groups.stop, (page + 1) * each)
            yield page, range(first - page * each, stop - page * each), slice(first - groups.start, stop - groups.start)

    def _fetched(self, layer: int, page: int) -> Tensor:
        """Return the newest copy of a page of an offloaded layer, over the link unless it is open.

        Raises TransferFailed.
        """
        if page in self.open_pages:
            return self.open_pages.buffer(layer, page)
        tiers, target = self.tiers, self.tiers.new_memory((self.tiers.format.numbers,))
        tiers.link.wait(ticket := tiers.link.copy([(target, tiers.pages[layer, page])], tiers.link.mark()))
        tiers.link.finish(ticket)
        return target

    def _dump_groups(self, groups: range) -> Tensor:
        format, runs = self.tiers.format, []
        for page, some, _ in self._pages_of(groups):
            offloaded = self.open_pages.newest(page).cpu()
            runs.append(format.grains(offloaded)[:, :, some.start : some.stop].flatten(2))
        offloaded = torch.cat(runs, dim=2)
        return torch.cat((super()._dump_groups(groups), offloaded)) if self.resident_layers else offloaded

    def _load_groups(self, first: int, groups: Tensor) -> None:
        self._close_pages()
        resident = self.resident_layers
        super()._load_groups(first, groups[:resident])
        for page, some, part in self._pages_of(range(first, first + groups.shape[2])):
            pages = self.tiers.format.grains(self.open_pages.edited(page))
            self._copy(pages[:, :, some.start : some.stop], groups[resident:, :, part])
