"""A full cache of quantised keys and values over tiers: some layers' groups lie in pages in host memory or on disk.

The device is a CPU. It has the bf16 tokens of the sink and of the newest windows, and the groups of the pages that the
pass writes to. Of the whole pages before it, every pass streams some once a layer, and attends to the others in host
memory meanwhile. If a page is a multiple of the kernel's PIECE, attention has the same bits as over a `QuantizedStore`.
"""

from __future__ import annotations

from concurrent.futures import Future, wait

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP
from ..kernels.accumulate import KernelAccumulator
from ..kernels.native.calls import partial_count
from ..kernels.native.kernel import Kernel
from ..kernels.native.kv_groups import quantize_call
from ..kv_cache.quantized_groups import group_items
from ..kv_cache.quantized_store import runs_of_windows
from .balance import Stopwatch
from .host_attention import HostResult, add_from_host
from .open_pages import OpenPages
from .prefetch import PrefetchItem, prefetch_order
from .quantized_reader import QuantizedTierReader
from .tiers import QuantizedTiers


class QuantizedTieredStore(QuantizedTierReader):
    """A `Store` (kv_cache/store.py) of quantised keys and values over tiers. Passes are between `begin` and `end`."""

    def __init__(
        self, kernel: Kernel, shape: ModelShape, capacity: int, dtype: torch.dtype, tiers: QuantizedTiers
    ) -> None:
        super().__init__(kernel, shape, capacity, dtype, tiers.format.kind, tiers.resident_layers)
        self.tiers, self.span = tiers, tiers.format.tokens
        self.open_pages = OpenPages(tiers)
        self._num_whole = 0  # whole pages before the pass
        self._num_streamed = 0  # of those, how many are streamed; the host attends to the others
        self._hosted: Future[HostResult] | None = None  # the last attention on the host
        self._clock = Stopwatch()
        self._running = False

    def begin(self, start: int, tokens: int, chunk: int | None = None, held: int = 0) -> None:
        """Begin a pass as in `Store`, and prefetch its first pages."""
        assert chunk is None, "a prompt is read chunk by chunk"
        self._recover()
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
        tiers = self.tiers
        tiers.ring.expect(prefetch_order(tiers.pages, self._num_streamed, 1, tiers.last_visits))

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

    def _quantize_groups(self, layer: int, groups: range, slots: list[int]) -> None:
        if layer < self.resident_layers:
            super()._quantize_groups(layer, groups, slots)
            return
        format, memory = self.tiers.format, self.tiers.open[layer - self.resident_layers]
        pages = [divmod(group, self.span // GROUP) for group in groups]
        places = [format.place(self.open_pages.slot(page)) + group for page, group in pages]
        items = group_items(self.shape.kv_heads, places, slots)
        self._kernel.quantize(quantize_call(self._blocks[layer], format.groups(memory), items, self.shape.head_dim))

    def _attend_chain(self, layer: int, q: Tensor, start: int) -> None:
        if layer < self.resident_layers:
            super()._attend_chain(layer, q, start)
            return
        result = self._attend_whole(layer, q)
        for at, some in runs_of_windows(start, len(q)):
            result.add(some, self._attend_newest(layer, q[some], at + 1, self._rows(at)))
        self._out.copy_(result.output())

    def _call(
        self, layer: int, q: Tensor, out: Tensor, seen: int, table: Tensor, parents: Tensor | None = None
    ) -> None:
        if layer < self.resident_layers:
            super()._call(layer, q, out, seen, table, parents)
            return
        result = self._attend_whole(layer, q)
        result.add(slice(None), self._attend_newest(layer, q, seen, table, parents))
        out.copy_(result.output())

    def _attend_whole(self, layer: int, q: Tensor) -> KernelAccumulator:
        """Attend to the whole pages before the pass, of which every row sees all."""
        tiers, result = self.tiers, KernelAccumulator(self._kernel, q)
        rest = self._clock.lap()
        host = self._submit(layer, q)
        for page in range(self._num_streamed):
            buffer = tiers.ring.take(PrefetchItem((layer - self.resident_layers, page), tiers.pages))
            result.add(slice(None), self._attend_page(layer, q, page, buffer))
            tiers.ring.release(buffer)
            if tiers.ring.seconds is not None:
                tiers.balance.observe_link(tiers.ring.seconds)
        if host is not None:
            add_from_host(host, len(q), rest, tiers.balance, result)
        self._clock.start()
        return result

    def _submit(self, layer: int, q: Tensor) -> Future[HostResult] | None:
        """Start host attention to the whole pages that are not streamed, if there are any."""
        first = self._num_streamed
        if first == self._num_whole:
            return None
        pages = self.tiers.pages[layer - self.resident_layers, first : self._num_whole]
        attend = lambda index, page: self._attend_page(layer, q, first + index, page)  # noqa: E731
        self._hosted = self.tiers.host.attend_each(pages, attend)
        return self._hosted

    def _attend_page(self, layer: int, q: Tensor, page: int, memory: Tensor) -> Tensor:
        """Return attention of all rows to a whole page, which lies in `memory`."""
        table = self.tiers.format.whole_table(page)
        return self._partials(layer, q, self.span, table, memory.unsqueeze(0), causal=False)

    def _attend_newest(self, layer: int, q: Tensor, seen: int, table: Tensor, parents: Tensor | None = None) -> Tensor:
        """Return attention to the pages of the pass, causal, by a table `[kv_heads, blocks]` of all blocks."""
        format, slots = self.tiers.format, self.open_pages.slots
        first, end = (page * format.blocks for page in (self._num_whole, self._num_whole + slots))
        own = format.moved(table[:1, first:end], slots).expand(len(table), -1)
        memory = self.tiers.open[layer - self.resident_layers]
        return self._partials(layer, q, seen - first * BLOCK, own, memory, parents=parents)

    def _partials(
        self,
        layer: int,
        q: Tensor,
        seen: int,
        table: Tensor,
        pages: Tensor,
        causal: bool = True,
        parents: Tensor | None = None,
    ) -> Tensor:
        """Return partial attention, as `BlockCalls.attention` has it, to groups of pages and blocks on the device."""
        count = partial_count(seen, len(q), causal, parents)
        partials = torch.empty((count, *q.shape[:2], 2 + q.shape[2]), dtype=torch.float32)
        groups = self.tiers.format.groups(pages)
        more = {"table": table, "partials": partials, "parents": parents, "groups": groups}
        self._kernel.attend(self._calls.attention(self._blocks[layer], q, seen, causal, **more))
        return partials
