"""A full cache's store of quantised keys and values, which changes the answer: `--kv q8`.

A token attends to quantised keys and values of all whole windows before its own, and to bf16 ones of its own window.
That depends on its position alone, so its result has the same bits however it is computed.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP, WINDOW
from ..kernels.accumulate import KernelAccumulator
from ..kernels.native.kernel import Kernel
from ..kernels.native.kv_groups import Groups, dequantize_call, kv_format, quantize_call
from .block_store import BlockStore
from .quantized_groups import GROUP_BLOCKS, GroupTiers, group_items
from .quantized_memory import WINDOW_BLOCKS, QuantizedMemory, runs_of_windows
from .tree_attention import Tree


class _Part(NamedTuple):
    """One call over some rows of a pass, by a block table `[kv_heads, blocks]`."""

    rows: slice
    seen: int
    table: Tensor
    parents: Tensor | None = None


class QuantizedStore(QuantizedMemory):
    """Quantised keys and values, attended to by the native kernel.

    A block's number in the order of the sequence becomes its place by a block table: that of its group where it is
    quantised, else its slot in the ring. If a page is a multiple of the kernel's PIECE, attention over tiers has the
    same bits as over one memory.
    """

    def __init__(
        self,
        kernel: Kernel,
        shape: ModelShape,
        capacity: int,
        dtype: torch.dtype,
        kind: str,
        tiers: GroupTiers | None = None,
    ) -> None:
        self.kernel = self._kernel = kernel
        self._format = kv_format(kind)
        self._newest_table: tuple[tuple[int, int], Tensor] | None = None  # what it depends on, and the table
        super().__init__(shape, capacity, dtype, torch.device("cpu"), kind, tiers)
        self._layers = [Groups(layer, self._format) for layer in self.groups.memory.unbind()]  # resident ones

    def new_device_store(self, capacity: int) -> BlockStore:
        return BlockStore(self._kernel, self.shape, capacity, self.dtype)

    def encode(self, layer: int, groups: range, at: int) -> None:
        for memory, some, part in self.groups.targets(layer, groups):
            first, end = (at // BLOCK + number * GROUP_BLOCKS for number in (part.start, part.stop))
            blocks = range(first, end, GROUP_BLOCKS)
            items = group_items(self.shape.kv_heads, some, blocks)
            call = quantize_call(self._exact.layer(layer), Groups(memory, self._format), items, self.shape.head_dim)
            self._kernel.quantize(call)

    def decode(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        every, head_dim = range(groups.shape[0] * groups.shape[1]), self.shape.head_dim
        memory, items = Groups(groups.view(1, len(every), -1), self._format), group_items(1, every, every)
        keys, values = (
            torch.empty((len(groups), groups.shape[1] * GROUP, head_dim), dtype=self.dtype) for _ in range(2)
        )
        both = (x.view(-1, GROUP, head_dim) for x in (keys, values))
        self._kernel.quantize(dequantize_call(memory, items, *both))
        return keys, values

    @property
    def _exact(self) -> BlockStore:
        """Return the memory of tokens that are not quantised."""
        store = self.ring.store
        assert isinstance(store, BlockStore)
        return store

    def table(self, position: int) -> Tensor:
        """Return the places of all blocks `[blocks]`, int32, for a token at a position.

        ~b is the place of a quantised block b. See `BlockCalls.attention`.
        """
        key = position // WINDOW * WINDOW_BLOCKS, self.ring.size // BLOCK
        if self._newest_table is None or self._newest_table[0] != key:  # the same in all layers
            numbers = torch.arange(-(-self._capacity // BLOCK))
            table = torch.where(numbers < key[0], ~numbers, numbers % key[1]).to(torch.int32)
            self._newest_table = key, table
        return self._newest_table[1]

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        """Attend as in `Store`; with a `tree`, a token's result has the bits of the chain that its path is."""
        parts = self._parts(start, len(q), tree)
        if self.tiers is not None and layer >= self.resident_layers:
            return self._attend_tiers(self.tiers, layer, q, parts, lse)
        out, groups = torch.empty_like(q), self._layers[layer]
        for part in parts:
            more: dict[str, Any] = {"out": out[part.rows], "lse": None if lse is None else lse[part.rows]}
            more |= {"table": part.table, "parents": part.parents, "groups": groups}
            self._kernel.attend(self._exact.calls.attention(self._exact.layer(layer), q[part.rows], part.seen, **more))
        return out

    def attend_table(
        self, layer: int, q: Tensor, table: Tensor, seen: int, tree: Tree | None = None, lse: Tensor | None = None
    ) -> Tensor:
        """Attend to the places of `table` `[kv_heads, blocks]`; see `BlockStore.attend_table`. Not over tiers."""
        return self._exact.attend_table(layer, q, table, seen, tree, lse, self._layers[layer])

    def places(self, blocks: Tensor, position: int) -> Tensor:
        """Return a table for `attend_table` of blocks of the sequence, for queries from `position` on."""
        table = self.table(position)
        return table[blocks.clamp(max=len(table) - 1)]

    def _rows(self, position: int) -> Tensor:
        return self.table(position).unsqueeze(0).expand(self.shape.kv_heads, -1)

    def _parts(self, start: int, tokens: int, tree: Tree | None) -> Iterator[_Part]:
        """Yield the calls of a pass."""
        if tree is None:
            for at, some in runs_of_windows(start, tokens):
                yield _Part(some, at + 1, self._rows(at))
        else:
            assert tree.depth <= self.deepest_tree(start), "a tree across the end of a window"
            yield _Part(slice(0, tokens), start + 1, self._rows(start), tree.on(self.device).parents)

    def _attend_tiers(
        self, tiers: GroupTiers, layer: int, q: Tensor, parts: Iterator[_Part], lse: Tensor | None
    ) -> Tensor:
        result, format, slots = KernelAccumulator(self._kernel, q), tiers.format, tiers.open_pages.slots
        blocks, calls, paged = self._exact.layer(layer), self._exact.calls, layer - self.resident_layers
        first, end = (page * format.blocks for page in (tiers.num_whole, tiers.num_whole + slots))
        for whole in tiers.attend(paged, q, result):
            if whole is not None:
                result.add(slice(0, len(q)), format.attend_whole(whole[1], q))
                continue
            for part in parts:
                table = format.moved(part.table[:1, first:end], slots).expand(len(part.table), -1)
                more: dict[str, Any] = {"table": table, "groups": format.groups(tiers.open[paged])}
                more |= {"parents": part.parents}
                seen = part.seen - first * BLOCK
                result.add(part.rows, calls.partials(self._kernel, blocks, q[part.rows], seen, **more))
        return result.output(lse)
