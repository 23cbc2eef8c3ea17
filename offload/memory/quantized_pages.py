"""Pages of quantised keys and values, and attention to them on the host of a GPU."""

from __future__ import annotations

from concurrent.futures import Future
from functools import lru_cache

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP, SINK, WINDOW, group_bytes
from ..kernels.accumulate import Accumulator, KernelAccumulator, TorchAccumulator
from ..kernels.attention import Partial, attend
from ..kernels.kv_groups import dequantize_groups
from ..kernels.native import Kernel
from ..kernels.native.calls import BlockCalls
from ..kernels.native.kv_groups import Groups, kv_format
from .host_attention import HostResult, HostThread
from .page import PageLayout


class QuantizedPageFormat(PageLayout):
    """Pages `[numbers]`, uint8, of groups `[kv_heads, tokens / 32, bytes]`. The sink's group is not used."""

    def __init__(self, shape: ModelShape, tokens: int, kind: str) -> None:
        assert tokens % WINDOW == 0, "pages are whole windows"
        self.tokens, self.kind = tokens, kind
        self.blocks = tokens // BLOCK
        self._heads, self.group_bytes = shape.kv_heads, group_bytes(kind, shape.head_dim)
        self.numbers = shape.kv_heads * tokens // GROUP * self.group_bytes

    def grains(self, pages: Tensor) -> Tensor:
        """View pages `[..., numbers]` as `[..., kv_heads, groups, bytes]`."""
        return pages.unflatten(-1, (self._heads, -1, self.group_bytes))

    def groups(self, pages: Tensor) -> Groups:
        """Return pages `[n, numbers]` as the kernel takes them; group g of page p has number `place(p) + g`."""
        return Groups(self.grains(pages).flatten(0, 1), kv_format(self.kind))

    def place(self, page: int) -> int:
        """Return the number of the first group of a page among those of consecutive pages."""
        return page * self._heads * self.tokens // GROUP

    def whole_table(self, page: int) -> Tensor:
        """Return a table, as of `BlockCalls.attention`, of a whole page by itself; of page 0, with the bf16 sink."""
        return _whole_table(self.blocks, SINK // BLOCK if page == 0 else 0).expand(self._heads, -1)

    def moved(self, table: Tensor, slots: int) -> Tensor:
        """Return a table `[rows, blocks]` for groups that lie in slots: those of page p in slot p modulo `slots`."""
        block = ~table
        place = block // self.blocks % slots * (self._heads * self.blocks) + block % self.blocks
        return torch.where(table < 0, ~place, table).to(torch.int32)


@lru_cache(maxsize=64)
def _whole_table(blocks: int, sink: int) -> Tensor:
    with torch.inference_mode(False):
        table = ~torch.arange(blocks, dtype=torch.int32)
        table[:sink] = torch.arange(sink, dtype=torch.int32)
        return table.unsqueeze(0)


class QuantizedHostAttention(HostThread):
    """Attends to whole pages but the sink, which is on the device, by the native kernel; without one, by torch."""

    def __init__(
        self,
        format: QuantizedPageFormat,
        shape: ModelShape,
        kernel: Kernel | None,
        device: torch.device,
        bandwidth: float | None = None,
    ) -> None:
        super().__init__(device, bandwidth)
        self._format, self._shape, self._kernel = format, shape, kernel
        self._calls = BlockCalls(shape, 1)

    def submit(self, pages: Tensor, first: int, q: Tensor) -> Future[HostResult]:
        copy, arrived = (q, None) if q.device.type == "cpu" else self._copied(q)

        def state() -> Tensor:
            found = self._summed(pages, first, copy)
            return found if arrived is None else found.pin_memory()

        return self._submit(pages, lambda: ([], state()), arrived)

    def _summed(self, pages: Tensor, first: int, q: Tensor) -> Tensor:
        """Return the state of attention to all the pages."""
        result: Accumulator = (
            TorchAccumulator(q, attend) if self._kernel is None else KernelAccumulator(self._kernel, q)
        )
        for number, page in enumerate(pages, first):
            from_group = SINK // GROUP if number == 0 else 0
            part = self._by_torch(page, q, from_group) if self._kernel is None else self._natively(page, q, from_group)
            result.add(slice(0, len(q)), part)
        return result.state()

    def _by_torch(self, page: Tensor, q: Tensor, first: int) -> Partial:
        groups = self._format.grains(page)[:, first:]
        keys, values = dequantize_groups(groups, self._shape.head_dim, self._format.kind, q.dtype)
        return attend(q, keys.flatten(1, 2), values.flatten(1, 2))

    def _natively(self, page: Tensor, q: Tensor, first: int) -> Tensor:
        seen = self._format.tokens - first * GROUP
        none = torch.empty((self._shape.kv_heads, 1, 2 * BLOCK * self._shape.head_dim), dtype=q.dtype)
        table = self._format.whole_table(1)[:, first * GROUP // BLOCK :]
        groups = self._format.groups(page.unsqueeze(0))
        return self._calls.partials(self._kernel, none, q, seen, False, table=table, groups=groups)
