"""The page format of quantised keys and values: their groups, head by head, as the native kernel reads them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP, SINK, WINDOW, group_bytes
from ..kernels.native.kv_groups import Groups, kv_format
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
