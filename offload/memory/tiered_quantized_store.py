"""A full cache of quantised keys and values over tiers: some layers' groups lie in pages in host memory or on disk.

The device is a CPU, whose native kernel attends. If a page is a multiple of the kernel's PIECE, attention has the same
bits as over a `QuantizedStore`. Passes are those of quantized_passes.py.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP
from ..kernels.accumulate import KernelAccumulator
from ..kernels.native.calls import partial_count
from ..kernels.native.kernel import Kernel
from ..kernels.native.kv_groups import quantize_call
from .host_attention import HostResult, add_from_host
from .quantized_groups import group_items
from .quantized_reader import QuantizedTierReader
from .quantized_store import runs_of_windows
from .tiers import QuantizedTiers


class QuantizedTieredStore(QuantizedTierReader):
    """A `Store` (memory/store.py) of quantised keys and values over tiers. Passes are between `begin` and `end`."""

    def __init__(
        self, kernel: Kernel, shape: ModelShape, capacity: int, dtype: torch.dtype, tiers: QuantizedTiers
    ) -> None:
        super().__init__(kernel, shape, capacity, dtype, tiers.format.kind, tiers.resident_layers)
        self._use_tiers(tiers)

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
        result = KernelAccumulator(self._kernel, q)
        rest = self._clock.lap()
        host = self._submit(layer, q)
        for page, buffer in self._streamed(layer):
            result.add(slice(None), self._attend_page(layer, q, page, buffer))
        if host is not None:
            add_from_host(host, len(q), rest, self.tiers.balance, result)
        self._clock.start()
        return result

    def _submit(self, layer: int, q: Tensor) -> Future[HostResult] | None:
        """Start host attention to the whole pages that are not streamed, if there are any."""
        first = self._num_streamed
        if (pages := self._on_host(layer)) is None:
            return None
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
        more: dict[str, Any] = {"table": table, "partials": partials, "parents": parents, "groups": groups}
        self._kernel.attend(self._calls.attention(self._blocks[layer], q, seen, causal, **more))
        return partials
