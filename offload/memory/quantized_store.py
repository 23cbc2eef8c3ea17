"""A full cache's store of quantised keys and values, which changes the answer: `--kv q8`.

A token attends to quantised keys and values of all whole windows before its own, and to bf16 ones of its own window and
of the sink. That depends on its position alone, so its result has the same bits however it is computed.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP, SINK, WINDOW
from ..kernels.accumulate import KernelAccumulator
from ..kernels.native.kernel import Kernel
from ..kernels.native.kv_groups import Groups, kv_format, quantize_call
from ..kernels.native.layout import move_tokens
from .block_store import BlockStore
from .quantized_groups import GROUP_BLOCKS, GroupTiers, dequantized, group_items
from .quantized_memory import SINK_BLOCKS, WINDOW_BLOCKS, QuantizedMemory, Ring, runs_of_windows
from .tree_attention import Tree


class _Part(NamedTuple):
    """One call over some rows of a pass, by a block table `[kv_heads, blocks]`; `others` are computed by other ones."""

    rows: slice
    seen: int
    table: Tensor
    parents: Tensor | None = None
    others: Sequence[int] = ()

    def runs(self) -> Iterator[slice]:
        """Yield the rows without the others."""
        first = self.rows.start
        for row in (*self.others, self.rows.stop):
            if first < row:
                yield slice(first, row)
            first = row + 1


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
        # For a token at a position, and up to which block it has quantised ones; -1: it is not valid.
        self._table, self._quantized_end = torch.empty(-(-capacity // WINDOW) * WINDOW_BLOCKS, dtype=torch.int32), -1
        super().__init__(shape, capacity, dtype, torch.device("cpu"), kind, tiers)
        self._layers = [Groups(layer, self._format) for layer in self.groups.memory.unbind()]  # resident ones

    def new_device_store(self, capacity: int) -> BlockStore:
        return BlockStore(self._kernel, self.shape, capacity, self.dtype)

    def _new_ring(self, size: int) -> Ring:
        self._quantized_end = -1  # the table has slots of the old ring
        return super()._new_ring(size)

    def encode(self, layer: int, groups: range, at: int) -> None:
        for memory, some, part in self.groups.targets(layer, groups):
            first, end = (at // BLOCK + number * GROUP_BLOCKS for number in (part.start, part.stop))
            blocks = range(first, end, GROUP_BLOCKS)
            items = group_items(self.shape.kv_heads, some, blocks)
            call = quantize_call(self._exact.layer(layer), Groups(memory, self._format), items, self.shape.head_dim)
            self._kernel.quantize(call)

    def decode(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        every = range(groups.shape[0] * groups.shape[1])
        memory = Groups(groups.view(1, len(every), -1), self._format)
        both = dequantized(self._kernel, memory, group_items(1, every, every), self.shape.head_dim, self.dtype)
        keys, values = (x.view(len(groups), -1, self.shape.head_dim) for x in both)
        return keys, values

    @property
    def _exact(self) -> BlockStore:
        """Return the memory of tokens that are not quantised."""
        store = self.ring.store
        assert isinstance(store, BlockStore)
        return store

    def table(self, position: int) -> Tensor:
        """Return the places of all blocks `[blocks]`, int32, for a token at a position; valid until the next call.

        ~b is the place of a quantised block b. See `BlockCalls.attention`.
        """
        end = max(position // WINDOW * WINDOW_BLOCKS, SINK_BLOCKS)
        if end != self._quantized_end:
            before, self._quantized_end = self._quantized_end, -1  # until done: an interrupt may come in between
            if before < 0:
                before = SINK_BLOCKS
                self._table.copy_(self.ring.slots(torch.arange(len(self._table))))
            numbers = torch.arange(min(end, before), max(end, before))
            self._table[numbers] = (~numbers if end > before else self.ring.slots(numbers)).to(torch.int32)
            self._quantized_end = end
        return self._table

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        """Attend as in `Store`; with a `tree`, a token's result has the bits of the chain that its path is."""
        parts = self._parts(layer, start, len(q), tree)
        if self.tiers is not None and layer >= self.resident_layers:
            return self._attend_tiers(self.tiers, layer, q, parts, lse)
        out, groups = torch.empty_like(q), self._layers[layer]
        for part in parts:
            more: dict[str, Any] = {"out": out[part.rows], "lse": None if lse is None else lse[part.rows]}
            more |= {"table": part.table, "parents": part.parents, "groups": groups}
            self._kernel.attend(self._exact.calls.attention(self._exact.layer(layer), q[part.rows], part.seen, **more))
        return out

    def observe(self, layer: int, q: Tensor, start: int, lse: Tensor, received: Tensor) -> None:
        for part in self._parts(layer, start, len(q), None):
            more: dict[str, Any] = {"table": part.table, "groups": self._layers[layer]}
            rows = q[part.rows], part.seen, lse[part.rows], received
            self._kernel.observe(self._exact.calls.observation(self._exact.layer(layer), *rows, **more))

    def attend_table(
        self, layer: int, q: Tensor, table: Tensor, seen: int, tree: Tree | None = None, lse: Tensor | None = None
    ) -> Tensor:
        """Attend to the places of `table` `[kv_heads, blocks]`; see `BlockStore.attend_table`. Not over tiers."""
        return self._exact.attend_table(layer, q, table, seen, tree, lse, self._layers[layer])

    def places(self, blocks: Tensor, position: int) -> Tensor:
        """Return a table for `attend_table` of blocks of the sequence, for queries from `position` on."""
        return self.table(position)[blocks.clamp(max=len(self._table) - 1)]

    def _rows(self, position: int) -> Tensor:
        return self.table(position).unsqueeze(0).expand(self.shape.kv_heads, -1)

    def _parts(self, layer: int, start: int, tokens: int, tree: Tree | None) -> Iterator[_Part]:
        """Yield the calls of a pass; each must be made before the next one is asked for.

        Tokens of a tree behind the end of the window see it quantised, and are computed by their paths.
        """
        if tree is None:
            for at, some in runs_of_windows(start, tokens):
                yield _Part(some, at + 1, self._rows(at))
            return
        border, first = (start // WINDOW + 1) * WINDOW, len(tree) - tokens
        behind = [row for row in range(tokens) if start + tree.depths[first + row] >= border]
        yield _Part(slice(0, tokens), start + 1, self._rows(start), tree.on(self.device).parents, behind)
        for row in behind:
            yield self._path(layer, row, start, tree.path_to(first + row))

    def _path(self, layer: int, row: int, start: int, path: Sequence[int]) -> _Part:
        """Return the call of one query for a path of the tree from `start` on, across the end of the window.

        Window and path are copied behind the ring. The window's groups are not in use until it is complete.
        """
        border = (start // WINDOW + 1) * WINDOW
        first, scratch = border - WINDOW, self.ring.scratch
        assert start + len(path) <= border + WINDOW, "a path across two borders"
        tokens = [*range(first, start), *(start + token for token in path)]
        sources, targets = self.ring.slots_of(tokens), scratch * BLOCK + torch.arange(len(tokens))
        move_tokens(self._exact.layer(layer), self.shape.head_dim, sources, targets)
        groups = range(max(first, SINK) // GROUP, border // GROUP)
        self.encode(layer, groups, scratch * BLOCK + groups.start * GROUP - first)
        table = self.table(border).clone()
        behind = table[border // BLOCK :][:WINDOW_BLOCKS]
        behind.copy_(scratch + WINDOW_BLOCKS + torch.arange(len(behind)))
        table = table.unsqueeze(0).expand(self.shape.kv_heads, -1)
        return _Part(slice(row, row + 1), start + len(path), table)

    def _attend_tiers(
        self, tiers: GroupTiers, layer: int, q: Tensor, parts: Iterator[_Part], lse: Tensor | None
    ) -> Tensor:
        result, every, format = KernelAccumulator(self._kernel, q), slice(0, len(q)), tiers.format
        blocks, calls, paged = self._exact.layer(layer), self._exact.calls, layer - self.resident_layers

        def attend(page: int, memory: Tensor, q: Tensor) -> Tensor:
            groups = format.groups(memory.unsqueeze(0))
            more: dict[str, Any] = {"table": format.whole_table(page), "groups": groups}
            return calls.partials(self._kernel, blocks, q, self.page_tokens, causal=False, **more)

        def newest() -> None:
            slots = tiers.open_pages.slots
            first, end = (page * format.blocks for page in (tiers.num_whole, tiers.num_whole + slots))
            more: dict[str, Any] = {"groups": format.groups(tiers.open[paged])}
            for part in parts:
                more |= {"table": format.moved(part.table[:1, first:end], slots).expand(len(part.table), -1)}
                seen, begin = part.seen - first * BLOCK, part.rows.start
                partials = calls.partials(self._kernel, blocks, q[part.rows], seen, parents=part.parents, **more)
                for run in part.runs():
                    result.add(run, partials[:, run.start - begin : run.stop - begin].contiguous())

        for whole in tiers.attend(paged, q, result, attend):
            if whole is None:
                newest()
            else:
                result.add(every, attend(*whole, q))
        return result.output(lse)
