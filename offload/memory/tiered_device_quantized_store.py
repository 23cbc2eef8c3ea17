"""A GPU's full cache of quantised keys and values over tiers: pages of groups in host memory, as on a CPU.

Triton's kernel attends to a page where it was copied to. Passes are those of quantized_passes.py.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import GROUP, SINK, WINDOW
from ..kernels.attention import Partial
from ..kernels.triton.group_accumulator import GroupAccumulator
from .device_quantized_gather import gather_groups
from .device_quantized_store import DeviceQuantizedStore, runs_of_one_kind
from .host_attention import HostResult, add_from_host
from .quantized_passes import QuantizedPasses
from .quantized_store import runs_of_windows
from .tiers import QuantizedTiers
from .tree_attention import Tree


class DeviceQuantizedTieredStore(QuantizedPasses, DeviceQuantizedStore):
    """A `Store` (memory/store.py) of quantised keys and values over tiers. Passes are between `begin` and `end`."""

    def __init__(self, shape: ModelShape, capacity: int, dtype: torch.dtype, tiers: QuantizedTiers) -> None:
        super().__init__(shape, capacity, dtype, tiers.open.device, tiers.format.kind, tiers.resident_layers)
        self._use_tiers(tiers)

    def _store_groups(self, layer: int, groups: range, part: Tensor) -> None:
        if layer < self.resident_layers:
            super()._store_groups(layer, groups, part)
            return
        for page, some, at in self._pages_of(groups):
            self._open_groups(layer, page)[:, some.start : some.stop] = part[:, at]

    def _open_groups(self, layer: int, page: int) -> Tensor:
        """View an open page of an offloaded layer as `[kv_heads, groups, bytes]`."""
        return self.tiers.format.grains(self.open_pages.buffer(layer - self.resident_layers, page))

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None) -> Tensor:
        if tree is not None or layer < self.resident_layers:
            return super().attend(layer, q, start, tree)
        result = GroupAccumulator(q, self.shape.kv_heads, self.kind)
        rest, host = self._clock.lap(), self._submit(layer, q)
        for at, some in runs_of_one_kind(start, len(q)):
            self._attend_exact(layer, result, some, at)
        self._attend_open(layer, result, start, len(q))
        self._attend_whole(layer, result, len(q), host, rest)
        return result.output()

    def _attend_open(self, layer: int, result: GroupAccumulator, start: int, tokens: int) -> None:
        """Attend to the groups of the pass's own pages: those of the windows before a token's own."""
        for page in range(self._num_whole, (start + tokens - 1) // self.span + 1):
            base, groups, first = page * self.span, self._open_groups(layer, page), _first_group(page)
            low, high = (min(max(at, start), start + tokens) for at in (base, base + self.span))
            for at, some in runs_of_windows(low, high - low):
                rows = slice(some.start + low - start, some.stop + low - start)
                result.attend_groups(rows, groups, first, (at // WINDOW * WINDOW - base) // GROUP)
            if high < start + tokens:
                result.attend_groups(slice(high - start, tokens), groups, first, self.span // GROUP)

    def _attend_rounded(self, layer: int, q: Tensor, stop: int) -> Partial:
        if layer < self.resident_layers:
            return super()._attend_rounded(layer, q, stop)
        result = GroupAccumulator(q, self.shape.kv_heads, self.kind)
        rest, host, each = self._clock.lap(), self._submit(layer, q), self.span // GROUP
        for page in range(self._num_whole, -(-stop // each)):
            end = min(stop - page * each, each)
            result.attend_groups(slice(0, len(q)), self._open_groups(layer, page), _first_group(page), end)
        self._attend_whole(layer, result, len(q), host, rest)
        return result.partial()

    def _attend_whole(
        self, layer: int, result: GroupAccumulator, rows: int, host: Future[HostResult] | None, rest: float | None
    ) -> None:
        """Attend to the whole pages before the pass, of which every row sees all."""
        for page, buffer in self._streamed(layer):
            groups = self.tiers.format.grains(buffer)
            result.attend_groups(slice(0, rows), groups, _first_group(page), self.span // GROUP)
        if host is not None:
            add_from_host(host, rows, rest, self.tiers.balance, result)
        self._clock.start()

    def _submit(self, layer: int, q: Tensor) -> Future[HostResult] | None:
        """Start host attention to the whole pages that are not streamed, if there are any."""
        if (pages := self._on_host(layer)) is None:
            return None
        self._hosted = self.tiers.host.submit(pages, self._num_streamed, q)
        return self._hosted

    def _groups_of(self, layer: int, groups: range) -> Tensor:
        if layer < self.resident_layers:
            return super()._groups_of(layer, groups)
        format, away = self.tiers.format, layer - self.resident_layers
        pages = [(format.grains(self._fetched(away, page)), some) for page, some, _ in self._pages_of(groups)]
        return torch.cat([page[:, some.start : some.stop] for page, some in pages], dim=1)

    def _groups_at(self, rows: Tensor, groups: Tensor) -> Tensor:
        heads = self.resident_layers * self.shape.kv_heads
        size = (*groups.shape, self.groups.shape[-1])
        found = torch.empty(size, dtype=torch.uint8, device=self.device)
        near = rows < heads
        found[near] = super()._groups_at(rows[near], groups[near])
        found[~near] = gather_groups(self.tiers, self.open_pages, rows[~near] - heads, groups[~near])
        return found


def _first_group(page: int) -> int:
    """Return the first group of a page that is attended to quantised."""
    return SINK // GROUP if page == 0 else 0
