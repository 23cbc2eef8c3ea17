"""A full cache's store of quantised keys and values, which changes the answer: `--kv q8`, `q4` and `fp8`.

A token attends to quantised keys and values of all whole windows before its own, and to bf16 ones of its own window and
of the sink. That depends on its position alone, so its result has the same bits however it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP, SINK, WINDOW
from ..kernels.accumulate import KernelAccumulator
from ..kernels.native.calls import BlockCalls, partial_count
from ..kernels.native.kernel import Kernel
from ..kernels.native.kv_groups import Groups, kv_format, quantize_call
from ..kernels.native.layout import keys_of, move_tokens, values_of
from .block_store import BlockStore
from .host_memory import host_memory
from .quantized_groups import GroupMemory, GroupTiers, dequantized, group_items
from .quantized_memory import SINK_BLOCKS, WINDOW_BLOCKS, QuantizedMemory, Ring, place_in_ring, window_capacity
from .tree_attention import Tree


def runs_of_windows(start: int, tokens: int) -> Iterator[tuple[int, slice]]:
    """Yield tokens from position `start` on by their windows: the first one's position, and which of the tokens."""
    at = start
    while at < start + tokens:
        end = min((at // WINDOW + 1) * WINDOW, start + tokens)
        yield at, slice(at - start, end - start)
        at = end


@dataclass(frozen=True)
class KernelRing(Ring):
    """The native kernel's blocks `[layers, kv_heads, slots, 2 * 16 * head_dim]`, with the calls over them.

    `places` `[blocks]` has the slot of each block of the sequence.
    """

    calls: BlockCalls
    places: Tensor


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

    _ring: KernelRing

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
        # For a token at a position, and up to which block it has quantised ones; -1: it is not valid.
        self._table, self._quantized_end = torch.empty(window_capacity(capacity) // BLOCK, dtype=torch.int32), -1
        super().__init__(shape, capacity, dtype, torch.device("cpu"), kind, tiers)
        self._layers: list[Groups] = []  # in one memory
        if isinstance(self.groups, GroupMemory):
            self._layers = [self._native(layer) for layer in self.groups.memory.unbind()]
        self._out = torch.empty(0, dtype=dtype)

    def _native(self, groups: Tensor) -> Groups:
        """Return groups `[kv_heads, n, bytes]` as the kernel takes them."""
        return Groups(groups, kv_format(self.kind))

    def _new_ring(self, size: int, slots: int) -> KernelRing:
        shape = self.shape
        memory = host_memory((shape.layers, shape.kv_heads, slots, 2 * BLOCK * shape.head_dim), self.dtype)
        blocks = range(self._capacity // BLOCK)
        places = torch.tensor([place_in_ring(block, size) for block in blocks], dtype=torch.int32)
        self._quantized_end = -1  # the table has slots of the old ring
        return KernelRing(size, memory, BlockCalls(shape, slots), places)

    @property
    def _blocks(self) -> Tensor:
        return self._ring.blocks

    @property
    def _calls(self) -> BlockCalls:
        return self._ring.calls

    def _put(
        self,
        layer: int,
        at: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: tuple[Tensor, Tensor],
        rotated: Tensor,
        stored: int,
    ) -> None:
        self._kernel.append(self._calls.append(self._blocks[layer], at, q, k, v, rows, rotated, stored))

    def _quantize_groups(self, layer: int, groups: range, slots: list[int]) -> None:
        for memory, some, part in self.groups.runs(layer, groups, to_write=True):
            items = group_items(self.shape.kv_heads, some, slots[part])
            self._kernel.quantize(quantize_call(self._blocks[layer], self._native(memory), items, self.shape.head_dim))

    def _dequantized(self, layer: int, groups: range) -> tuple[Tensor, Tensor]:
        parts = []
        for memory, some, _ in self.groups.runs(layer, groups):
            both = self._dequantized_items(memory, group_items(self.shape.kv_heads, some, some))
            parts.append([x.view(self.shape.kv_heads, -1, self.shape.head_dim) for x in both])
        keys, values = (torch.cat(x, dim=1) for x in zip(*parts, strict=True))
        return keys, values

    def _dequantized_items(self, memory: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        return dequantized(self._kernel, self._native(memory), items, self.shape.head_dim, self.dtype)

    def _move(self, targets: Tensor, sources: Tensor) -> None:
        move_tokens(self._blocks.flatten(0, 1), self.shape.head_dim, sources, targets)

    def _read_slots(self, layer: int, slots: list[int]) -> tuple[Tensor, Tensor]:
        some = self._blocks[layer][:, slots]
        keys, values = (of(some, self.shape.head_dim).flatten(1, 2) for of in (keys_of, values_of))
        return keys, values

    def table(self, position: int) -> Tensor:
        """Return the places of all blocks `[blocks]`, int32, for a token at a position; valid until the next call.

        ~b is the place of a quantised block b. See `BlockCalls.attention`.
        """
        end = position // WINDOW * WINDOW_BLOCKS
        if end != self._quantized_end:
            before, self._quantized_end = self._quantized_end, -1  # until done: an interrupt may come in between
            if before < 0:
                self._table.copy_(self._ring.places)
            low, high = sorted((max(end, SINK_BLOCKS), max(before, SINK_BLOCKS)))
            numbers = torch.arange(low, high, dtype=torch.int32)
            self._table[low:high] = ~numbers if end > before else self._ring.places[low:high]
            self._quantized_end = end
        return self._table

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        """Attend as in `Store`; with a `tree`, a token's result has the bits of the chain that its path is."""
        parts = self._parts(layer, start, len(q), tree)
        if self.tiers is not None:
            return self._attend_tiers(self.tiers, layer, q, parts, lse)
        out = self._buffer_for(q)
        for part in parts:
            more: dict[str, Any] = {"out": out[part.rows], "lse": None if lse is None else lse[part.rows]}
            self._call(layer, q[part.rows], part.seen, part.table, part.parents, **more)
        return out

    def observe(self, layer: int, q: Tensor, start: int, lse: Tensor, received: Tensor) -> None:
        for part in self._parts(layer, start, len(q), None):
            more: dict[str, Any] = {"table": part.table, "groups": self._layers[layer]}
            rows = q[part.rows], part.seen, lse[part.rows], received
            self._kernel.observe(self._calls.observation(self._blocks[layer], *rows, **more))

    def attend_table(
        self,
        layer: int,
        q: Tensor,
        table: Tensor,
        seen: int,
        tree: Tree | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend to the places of `table` `[kv_heads, blocks]`; see `BlockStore.attend_table`. Not over tiers."""
        parents = None if tree is None else tree.on(self.device).parents
        out = self._buffer_for(q)
        self._call(layer, q, seen, table, parents, out=out, lse=lse)
        return out

    def _call(self, layer: int, q: Tensor, seen: int, table: Tensor, parents: Tensor | None, **more: Any) -> None:
        groups, blocks = self._layers[layer], self._blocks[layer]
        self._kernel.attend(self._calls.attention(blocks, q, seen, table=table, parents=parents, groups=groups, **more))

    def _buffer_for(self, q: Tensor) -> Tensor:
        if self._out.shape != q.shape:
            self._out = torch.empty(q.shape, dtype=q.dtype)
        return self._out

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
        first, scratch = border - WINDOW, SINK_BLOCKS + self._ring.size
        assert start + len(path) <= border + WINDOW, "a path across two borders"
        tokens = [*range(first, start), *(start + token for token in path)]
        sources = self._token_slots(tokens)
        move_tokens(self._blocks[layer], self.shape.head_dim, sources, scratch * BLOCK + torch.arange(len(tokens)))
        groups = range(max(first, SINK) // GROUP, border // GROUP)
        self._quantize_groups(layer, groups, [scratch + (group * GROUP - first) // BLOCK for group in groups])
        table = self.table(border).clone()
        behind = table[border // BLOCK :][:WINDOW_BLOCKS]
        behind.copy_(scratch + WINDOW_BLOCKS + torch.arange(len(behind)))
        table = table.unsqueeze(0).expand(self.shape.kv_heads, -1)
        return _Part(slice(row, row + 1), start + len(path), table)

    def _attend_tiers(
        self, tiers: GroupTiers, layer: int, q: Tensor, parts: Iterator[_Part], lse: Tensor | None
    ) -> Tensor:
        result, every = KernelAccumulator(self._kernel, q), slice(0, len(q))

        def attend(page: int, memory: Tensor) -> Tensor:
            table = tiers.format.whole_table(page)
            return self._partials(layer, q, self.span, table, tiers.format.groups(memory.unsqueeze(0)), causal=False)

        def newest() -> None:
            for part in parts:
                found = self._attend_newest(tiers, layer, q[part.rows], part)
                for run in part.runs():
                    result.add(run, found[:, run.start - part.rows.start : run.stop - part.rows.start].contiguous())

        tiers.attend(
            layer,
            q,
            result,
            page=lambda page, memory: result.add(every, attend(page, memory)),
            newest=newest,
            partial=attend,
        )
        return result.output(lse)

    def _attend_newest(self, tiers: GroupTiers, layer: int, q: Tensor, part: _Part) -> Tensor:
        """Return attention to the pages of the pass, causal."""
        format, slots = tiers.format, tiers.open_pages.slots
        first, end = (page * format.blocks for page in (tiers.num_whole, tiers.num_whole + slots))
        own = format.moved(part.table[:1, first:end], slots).expand(len(part.table), -1)
        groups = format.groups(tiers.open[layer])
        return self._partials(layer, q, part.seen - first * BLOCK, own, groups, parents=part.parents)

    def _partials(
        self,
        layer: int,
        q: Tensor,
        seen: int,
        table: Tensor,
        groups: Groups,
        causal: bool = True,
        parents: Tensor | None = None,
    ) -> Tensor:
        """Return partial attention, as `BlockCalls.attention` has it, to groups and to blocks on the device."""
        count = partial_count(seen, len(q), causal, parents)
        partials = torch.empty((count, *q.shape[:2], 2 + q.shape[2]), dtype=torch.float32)
        more: dict[str, Any] = {"table": table, "partials": partials, "parents": parents, "groups": groups}
        self._kernel.attend(self._calls.attention(self._blocks[layer], q, seen, causal, **more))
        return partials

    def near(self, capacity: int) -> BlockStore:
        return BlockStore(self._kernel, self.shape, capacity, self.dtype)

    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Copy chunks as in `Store`, of whole groups; each page is fetched once."""
        shape = (len(rows), size // GROUP, GROUP, self.shape.head_dim)
        keys, values = (torch.empty(shape, dtype=self.dtype) for _ in range(2))
        each = self.groups.each
        layers, pages = rows // self.shape.kv_heads, chunks * size // (each * GROUP)
        in_bf16 = (chunks * size < SINK) | ((chunks + 1) * size > self._oldest)
        for layer, page in torch.stack((layers, pages))[:, ~in_bf16].unique(dim=1).T.tolist():
            at = ((layers == layer) & (pages == page) & ~in_bf16).nonzero().squeeze(1)
            groups = (chunks[at] * size // GROUP % each).unsqueeze(1) + torch.arange(size // GROUP)
            heads = (rows[at] % self.shape.kv_heads).unsqueeze(1).expand_as(groups)
            items = torch.stack((heads, groups, groups), dim=2).flatten(0, 1).to(torch.int32)
            ((memory, _, _),) = self.groups.runs(layer, range(page * each, (page + 1) * each))
            both = self._dequantized_items(memory, items)
            keys[at], values[at] = (x.view(len(at), *shape[1:]) for x in both)
        for layer, chunk in torch.stack((layers, chunks))[:, in_bf16].unique(dim=1).T.tolist():
            at = ((layers == layer) & (chunks == chunk)).nonzero().squeeze(1)
            both = self._read(layer, chunk * size, (chunk + 1) * size)
            keys[at], values[at] = (x[rows[at] % self.shape.kv_heads].view(len(at), *shape[1:]) for x in both)
        return keys.flatten(1, 2), values.flatten(1, 2)

    def places(self, blocks: Tensor, position: int) -> Tensor:
        """Return a table for `attend_table` of blocks of the sequence, for queries from `position` on."""
        return self.table(position)[blocks.clamp(max=len(self._table) - 1)]
