"""Pages of quantised keys and values, and attention to them on the host."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP, SINK, WINDOW
from ..kernels.accumulate import Accumulator, KernelAccumulator, TorchAccumulator
from ..kernels.attention import attend
from ..kernels.kv_groups import dequantize_groups
from ..kernels.native import Kernel
from ..kernels.native.calls import BlockCalls
from ..kernels.native.kv_groups import Groups, kv_format
from ..settings.kv_formats import KV_FORMATS
from .page import PageLayout


class QuantizedPageFormat(PageLayout):
    """Pages `[numbers]`, uint8, of groups `[kv_heads, tokens / 32, bytes]`. The sink's group is not used."""

    def __init__(self, shape: ModelShape, tokens: int, kind: str, kernel: Kernel | None = None) -> None:
        """`kernel` is the native one, if it attends on the host."""
        assert tokens % WINDOW == 0, "pages are whole windows"
        self._shape, self._kernel, self._calls = shape, kernel, BlockCalls(shape, 1)
        self.tokens, self.kind = tokens, kind
        self.blocks = tokens // BLOCK
        self.kv_heads, self.group_bytes = shape.kv_heads, KV_FORMATS[kind].run_bytes(shape.head_dim)
        self.numbers = shape.kv_heads * tokens // GROUP * self.group_bytes

    def grains(self, pages: Tensor) -> Tensor:
        """View pages `[..., numbers]` as `[..., kv_heads, groups, bytes]`."""
        return pages.unflatten(-1, (self.kv_heads, -1, self.group_bytes))

    @property
    def host(self) -> QuantizedPageFormat:
        """Return the format for pages in host memory."""
        return self

    def groups(self, pages: Tensor) -> Groups:
        """Return pages `[n, numbers]` as the kernel takes them; group g of page p has number `place(p) + g`."""
        return Groups(self.grains(pages).flatten(0, 1), kv_format(self.kind))

    def place(self, page: int) -> int:
        """Return the number of the first group of a page among those of consecutive pages."""
        return page * self.kv_heads * self.tokens // GROUP

    def whole_table(self, page: int) -> Tensor:
        """Return a table, as of `BlockCalls.attention`, of a whole page by itself; of page 0, with the bf16 sink."""
        return _whole_table(self.blocks, SINK // BLOCK if page == 0 else 0).expand(self.kv_heads, -1)

    def moved(self, table: Tensor, slots: int) -> Tensor:
        """Return a table `[rows, blocks]` for groups that lie in slots: those of page p in slot p modulo `slots`."""
        block = ~table
        place = block // self.blocks % slots * (self.kv_heads * self.blocks) + block % self.blocks
        return torch.where(table < 0, ~place, table).to(torch.int32)

    def accumulator(self, q: Tensor) -> Accumulator:
        """Return an empty accumulator of what `attend_whole` returns."""
        return TorchAccumulator(q, attend) if self._kernel is None else KernelAccumulator(self._kernel, q)

    def attend_whole(self, number: int, page: Tensor, q: Tensor) -> Any:
        """Attend to a whole page in host memory but the sink, by the native kernel; without one, by torch."""
        first, head_dim = SINK // GROUP if number == 0 else 0, self._shape.head_dim
        if self._kernel is None:
            both = dequantize_groups(self.grains(page)[:, first:], head_dim, self.kind, q.dtype)
            return attend(q, *(x.flatten(1, 2) for x in both))
        none = torch.empty((self.kv_heads, 1, 2 * BLOCK * head_dim), dtype=q.dtype)
        table = self.whole_table(1)[:, first * GROUP // BLOCK :]
        groups, seen = self.groups(page.unsqueeze(0)), self.tokens - first * GROUP
        return self._calls.partials(self._kernel, none, q, seen, False, table=table, groups=groups)


@lru_cache(maxsize=64)
def _whole_table(blocks: int, sink: int) -> Tensor:
    with torch.inference_mode(False):
        table = ~torch.arange(blocks, dtype=torch.int32)
        table[:sink] = torch.arange(sink, dtype=torch.int32)
        return table.unsqueeze(0)
