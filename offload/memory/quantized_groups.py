"""Where quantised groups of keys and values lie: in one memory, or in pages over tiers. Group g has tokens 32 g on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP
from ..kernels.native.kernel import Kernel
from ..kernels.native.kv_groups import Groups, dequantize_call
from ..settings.kv_formats import KV_FORMATS
from .host_memory import copy_bytes
from .open_pages import new_pages
from .quantized_pages import QuantizedPageFormat
from .tiers import Tiers

GroupTiers = Tiers[QuantizedPageFormat]
GROUP_BLOCKS = GROUP // BLOCK


class GroupMemory:
    """Groups of up to `capacity` tokens of all layers in the device's memory, `[layers, kv_heads, groups, bytes]`."""

    def __init__(self, shape: ModelShape, capacity: int, kind: str, device: torch.device) -> None:
        size = (shape.layers, shape.kv_heads, -(-capacity // GROUP), KV_FORMATS[kind].run_bytes(shape.head_dim))
        self.memory = new_pages(size, torch.uint8, device)
        self.each = size[2]  # groups that lie one behind the other

    def runs(self, layer: int, groups: range) -> Iterator[tuple[Tensor, range, slice]]:
        """Yield where a layer's groups are written to: `[kv_heads, n, bytes]`, their numbers there, which of them."""
        yield self.memory[layer], groups, slice(0, len(groups))

    def at(self, rows: Tensor, groups: Tensor) -> Tensor:
        """Return copies `[n, count, bytes]` on the device: of rows `[n]` the groups of number `groups` `[n, count]`.

        A row is layer * kv_heads + KV head.
        """
        return self.memory.flatten(0, 1)[rows.unsqueeze(1), groups]

    def dump(self, groups: range) -> Tensor:
        """Return groups of all layers, `[layers, kv_heads, bytes]`, in host memory; perhaps a view."""
        return self.memory[:, :, groups.start : groups.stop].flatten(2).cpu()

    def load(self, first: int, groups: Tensor) -> None:
        """Store groups `[layers, kv_heads, n, bytes]` from number `first` on."""
        copy_bytes(self.memory[:, :, first : first + groups.shape[2]], groups)


class GroupPages:
    """Groups in pages over tiers, with the methods of `GroupMemory`. They raise TransferFailed."""

    def __init__(self, tiers: GroupTiers) -> None:
        self._tiers, self._heads = tiers, tiers.format.kv_heads
        self.each = tiers.format.tokens // GROUP

    def runs(self, layer: int, groups: range) -> Iterator[tuple[Tensor, range, slice]]:
        for page, inside, some in self._tiers.split(groups.start, groups.stop, GROUP):
            assert page in self._tiers.open_pages, "a pass opens the pages that it writes to"
            memory = self._tiers.format.grains(self._tiers.open_pages.buffer(layer, page))
            yield memory, range(inside.start, inside.stop), some

    def at(self, rows: Tensor, groups: Tensor) -> Tensor:
        rows, groups, heads = rows.cpu().unsqueeze(1), groups.cpu(), self._heads
        return self._tiers.pick(rows // heads, groups // self.each, rows % heads, groups % self.each)

    def dump(self, groups: range) -> Tensor:
        return self._tiers.dump(groups.start, groups.stop, GROUP).flatten(2)

    def load(self, first: int, groups: Tensor) -> None:
        self._tiers.load(first, groups, GROUP)


def dequantized(
    kernel: Kernel, groups: Groups, items: Tensor, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return keys and values `[items, 32, head_dim]`, bf16 or fp32, of groups; items as `dequantize_call` has."""
    keys, values = (torch.empty((len(items), GROUP, head_dim), dtype=dtype) for _ in range(2))
    kernel.quantize(dequantize_call(groups, items, keys, values))
    return keys, values


def group_items(kv_heads: int, groups: Iterable[int], blocks: Iterable[int]) -> Tensor:
    """Return items, as of `quantize_call`, for the same groups of all heads; `blocks` are their first blocks."""
    pairs = list(zip(blocks, groups, strict=True))
    return torch.tensor([(head, *pair) for head in range(kv_heads) for pair in pairs], dtype=torch.int32).view(-1, 3)
