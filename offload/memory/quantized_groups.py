"""Where quantised groups of keys and values lie. Group g has 32 tokens, from token 32 g on."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP, WINDOW
from ..kernels.accumulate import Accumulator, KernelAccumulator, TorchAccumulator
from ..kernels.attention import attend
from ..kernels.kv_groups import dequantize_groups
from ..kernels.native.calls import BlockCalls
from ..kernels.native.kernel import Kernel
from ..kernels.native.kv_groups import Groups, kv_format
from ..settings.kv_formats import KV_FORMATS
from .host_memory import copy_bytes, new_pages
from .page import PageLayout
from .tiers import Tiers

GROUP_BLOCKS = GROUP // BLOCK


class QuantizedPageFormat(PageLayout):
    """Pages `[numbers]`, uint8, of groups `[kv_heads, tokens / 32, bytes]`."""

    def __init__(self, shape: ModelShape, tokens: int, kind: str, kernel: Kernel | None = None) -> None:
        """`kernel` is the native one, if it attends on the host."""
        assert tokens % WINDOW == 0, "pages are whole windows"
        self._shape, self._kernel, self._calls = shape, kernel, BlockCalls(shape, 1)
        self.tokens, self.kind = tokens, kind
        self.blocks = tokens // BLOCK
        self.kv_heads, self.group_bytes = shape.kv_heads, KV_FORMATS[kind].run_bytes(shape.head_dim)
        self.numbers = shape.kv_heads * tokens // GROUP * self.group_bytes

    def parts(self, pages: Tensor) -> Tensor:
        return pages.unflatten(-1, (self.kv_heads, -1, self.group_bytes))

    def groups(self, pages: Tensor) -> Groups:
        """Return pages `[n, numbers]` as the kernel takes them; group g of page p has number `place(p) + g`."""
        return Groups(self.parts(pages).flatten(0, 1), kv_format(self.kind))

    def place(self, page: int) -> int:
        """Return the number of the first group of a page among those of consecutive pages."""
        return page * self.kv_heads * self.tokens // GROUP

    def moved(self, table: Tensor, slots: int) -> Tensor:
        """Return a table `[rows, blocks]` for groups that lie in slots: those of page p in slot p modulo `slots`."""
        block = ~table
        place = block // self.blocks % slots * (self.kv_heads * self.blocks) + block % self.blocks
        return torch.where(table < 0, ~place, table).to(torch.int32)

    def accumulator(self, q: Tensor) -> Accumulator:
        return TorchAccumulator(q) if self._kernel is None else KernelAccumulator(self._kernel, q)

    def attend_whole(self, page: Tensor, q: Tensor) -> Any:
        """Attend to a whole page by the native kernel; without one, by torch."""
        if self._kernel is None:
            both = dequantize_groups(self.parts(page), self._shape.head_dim, q.dtype)
            return attend(q, *(x.flatten(1, 2) for x in both))
        none = torch.empty((self.kv_heads, 1, 2 * BLOCK * self._shape.head_dim), dtype=q.dtype)
        table = _whole_table(self.blocks).expand(self.kv_heads, -1)
        more: dict[str, Any] = {"table": table, "groups": self.groups(page.unsqueeze(0))}
        return self._calls.partials(self._kernel, none, q, self.tokens, False, **more)


@lru_cache(maxsize=64)
def _whole_table(blocks: int) -> Tensor:
    with torch.inference_mode(False):
        return ~torch.arange(blocks, dtype=torch.int32).unsqueeze(0)


GroupTiers = Tiers[QuantizedPageFormat]


class QuantizedGroups:
    """Groups of all layers: those of the first in the device's `memory`, those of the others in pages over tiers.

    Attributes:
        memory: `[resident layers, kv_heads, groups, bytes]`.
        resident_layers: how many layers that are.
    """

    def __init__(
        self, shape: ModelShape, capacity: int, kind: str, device: torch.device, tiers: GroupTiers | None
    ) -> None:
        """Make room for `capacity` tokens; without `tiers`, all layers are resident."""
        self._heads, self.tiers = shape.kv_heads, tiers
        self.resident_layers = shape.layers if tiers is None else shape.layers - len(tiers.pages)
        size = self.resident_layers, shape.kv_heads, -(-capacity // GROUP), KV_FORMATS[kind].run_bytes(shape.head_dim)
        self.memory = new_pages(size, torch.uint8, device)

    def targets(self, layer: int, groups: range) -> Iterator[tuple[Tensor, range, slice]]:
        """Yield where a layer's groups are written to: `[kv_heads, n, bytes]`, their numbers there, which of them."""
        if layer < self.resident_layers:
            yield self.memory[layer], groups, slice(0, len(groups))
            return
        for page, inside, some in self._tiers.split(groups.start, groups.stop, GROUP):
            assert page in self._tiers.open_pages, "a pass opens the pages that it writes to"
            memory = self._tiers.open_pages.buffer(layer - self.resident_layers, page)
            yield self._tiers.format.parts(memory), range(inside.start, inside.stop), some

    def on_device(self, layer: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield a layer's groups on the device up to number `stop`: the first one's number, `[kv_heads, n, bytes]`."""
        if layer < self.resident_layers:
            yield 0, self.memory[layer]
            return
        count = self._tiers.format.tokens // GROUP
        for page in range(self._tiers.num_whole, -(-stop // count)):
            memory = self._tiers.open_pages.buffer(layer - self.resident_layers, page)
            yield page * count, self._tiers.format.parts(memory)

    def at(self, rows: Tensor, groups: Tensor) -> Tensor:
        """Return copies `[n, count, bytes]` on the device: of rows `[n]` the groups of number `groups` `[n, count]`.

        A row is layer * kv_heads + KV head. Raises TransferFailed.
        """
        first = self.resident_layers * self._heads
        if self.tiers is None:
            return self.memory.flatten(0, 1)[rows.unsqueeze(1), groups]
        if not first:
            return self._in_pages(rows, groups)
        copies = torch.empty((*groups.shape, self.memory.shape[3]), dtype=torch.uint8, device=self.memory.device)
        is_resident = rows < first
        if is_resident.any():
            copies[is_resident] = self.memory.flatten(0, 1)[rows[is_resident].unsqueeze(1), groups[is_resident]]
        if not is_resident.all():
            copies[~is_resident] = self._in_pages(rows[~is_resident] - first, groups[~is_resident])
        return copies

    @property
    def _tiers(self) -> GroupTiers:
        assert self.tiers is not None
        return self.tiers

    def _in_pages(self, rows: Tensor, groups: Tensor) -> Tensor:
        rows, groups, count = rows.cpu().unsqueeze(1), groups.cpu(), self._tiers.format.tokens // GROUP
        return self._tiers.gather(rows // self._heads, groups // count, rows % self._heads, groups % count)

    def dump(self, groups: range) -> Tensor:
        """Return groups of all layers, `[layers, kv_heads, bytes]`, in host memory; perhaps a view."""
        resident = self.memory[:, :, groups.start : groups.stop].flatten(2).cpu()
        if self.tiers is None:
            return resident
        return torch.cat((resident, self.tiers.dump(groups.start, groups.stop, GROUP).flatten(2)))

    def load(self, first: int, groups: Tensor) -> None:
        """Store groups `[layers, kv_heads, n, bytes]` from number `first` on."""
        resident = groups[: self.resident_layers]
        copy_bytes(self.memory[:, :, first : first + groups.shape[2]], resident)
        if self.tiers is not None:
            self.tiers.load(first, groups[self.resident_layers :], GROUP)


def group_items(kv_heads: int, groups: Iterable[int], blocks: Iterable[int]) -> Tensor:
    """Return items, as of `quantize_call`, for the same groups of all heads; `blocks` are their first blocks."""
    pairs = list(zip(blocks, groups, strict=True))
    return torch.tensor([(head, *pair) for head in range(kv_heads) for pair in pairs], dtype=torch.int32).view(-1, 3)
