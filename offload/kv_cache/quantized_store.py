"""A full cache's store of quantised keys and values, which changes the answer: `--kv q8`, `q4` and `fp8`.

A token attends to quantised keys and values of all whole windows before its own, and to bf16 ones of its own window and
of the sink. That depends on its position alone, so its result has the same bits however it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP, SINK, WINDOW, ring_blocks
from ..kernels.native.calls import BlockCalls
from ..kernels.native.kernel import Kernel
from ..kernels.native.layout import keys_of, move_tokens, values_of
from .host_memory import host_memory
from .quantized_groups import GROUP_BLOCKS, QuantizedGroups, group_items
from .store import Store
from .tree import Tree

_SINK_BLOCKS, _WINDOW_BLOCKS = SINK // BLOCK, WINDOW // BLOCK


def _slot(block: int, ring: int) -> int:
    """Return where block `block` of a sequence lies among those of the sink and of a ring of `ring` blocks."""
    return block if block < _SINK_BLOCKS else _SINK_BLOCKS + block % ring


class QuantizedStore(Store):
    """Quantised groups of all tokens, and a ring of bf16 blocks of the newest ones; attended to by the native kernel.

    A block's number in the order of the sequence becomes its place by a block table: that of its group where it is
    quantised, else its slot in the ring.
    """

    grain = GROUP

    def __init__(self, kernel: Kernel, shape: ModelShape, capacity: int, dtype: torch.dtype, kind: str) -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device("cpu")
        self._kernel, self.kind = kernel, kind
        self._capacity = -(-capacity // WINDOW) * WINDOW
        self._groups = QuantizedGroups(kernel, shape, self._capacity, kind)
        self._newest = 0  # the position behind the last token that was stored since the last restart
        self._lost = 0  # the ring has no token before this position
        self._start, self._chunked = 0, False  # of the last pass of the full cache
        self._ring = 0  # blocks of it
        self._grow(WINDOW)
        self._rotated, self._out = (torch.empty(0, dtype=dtype) for _ in range(2))

    def _grow(self, tokens: int) -> None:
        """Make the ring large enough for `tokens` tokens, and for rollbacks of two windows."""
        ring = ring_blocks(tokens)
        if ring <= self._ring:
            return
        shape, lost = self.shape, self._oldest
        slots = _SINK_BLOCKS + ring + 2 * _WINDOW_BLOCKS  # the last ones: see `_attend_path`
        memory = host_memory((shape.layers, shape.kv_heads, slots, 2 * BLOCK * shape.head_dim), self.dtype)
        if self._ring:
            kept = (*range(_SINK_BLOCKS), *range(lost // BLOCK, -(-self._newest // BLOCK)))
            memory[:, :, [_slot(block, ring) for block in kept]] = self._blocks[:, :, [self._slot(x) for x in kept]]
        calls = BlockCalls(shape, slots)
        table = torch.tensor([_slot(block, ring) for block in range(self._capacity // BLOCK)], dtype=torch.int32)
        # All at once: an interrupt, or too little memory, must leave the old ring.
        self._blocks, self._calls, self._slots, self._lost, self._ring = memory, calls, table, lost, ring
        self._table, self._quantized_end = table.clone(), 0

    def _slot(self, block: int) -> int:
        return _slot(block, self._ring)

    @property
    def _oldest(self) -> int:
        """The first position from which the ring has all tokens."""
        return max(-(-self._newest // BLOCK) * BLOCK - self._ring * BLOCK, self._lost)

    def restartable(self, length: int) -> int:
        """Return the largest length, at most `length`, from which a sequence can go on: with its window in the ring."""
        start = length // WINDOW * WINDOW
        return length if start >= self._oldest else start

    def begin(self, start: int, tokens: int, chunk: int | None = None, held: int = 0) -> None:
        self._start, self._chunked = start, chunk is not None

    def truncate(self, length: int) -> None:
        self._start = min(self._start, length)
        if length // WINDOW * WINDOW < self._oldest:
            self._newest = self._lost = length

    def append(
        self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: tuple[Tensor, Tensor], stored: int = 0
    ) -> Tensor:
        """Store tokens as in `Store`; of the first `stored`, already there, only queries are rotated."""
        window = (start if self._chunked else min(self._start, start)) // WINDOW * WINDOW
        self._grow(start + len(q) - window)
        if self._rotated.shape != q.shape:
            self._rotated = torch.empty(q.shape, dtype=self.dtype)
        for at, some in self._runs(start, len(q)):
            part = (x[some] for x in (q, k, v))
            own = tuple(x[some] for x in rows)
            there = min(max(stored - some.start, 0), some.stop - some.start)
            call = self._calls.append(self._blocks[layer], at, *part, own, self._rotated[some], there)
            self._kernel.append(call)
        self._newest = max(self._newest, start + len(q))
        self._quantize(layer, start + stored, start + len(q))
        return self._rotated

    def _runs(self, start: int, tokens: int) -> Iterator[tuple[int, slice]]:
        """Yield runs of tokens whose slots follow each other: the position of the first slot, and which tokens."""
        at = start
        while at < start + tokens:
            block = at // BLOCK
            end = _SINK_BLOCKS if block < _SINK_BLOCKS else (block // self._ring + 1) * self._ring
            last = min(end * BLOCK, start + tokens)
            yield self._slot(block) * BLOCK + at % BLOCK, slice(at - start, last - start)
            at = last

    def _quantize(self, layer: int, start: int, end: int) -> None:
        """Quantise the windows that tokens from `start` to `end` complete."""
        first, last = start // WINDOW * WINDOW, end // WINDOW * WINDOW
        groups = range(max(first, SINK) // GROUP, last // GROUP)
        if groups:
            slots = [self._slot(group * GROUP_BLOCKS) for group in groups]
            self._groups.quantize(layer, self._blocks[layer], group_items(self.shape.kv_heads, groups, slots))

    def table(self, position: int) -> Tensor:
        """Return the places of all blocks `[blocks]`, int32, for a token at a position; valid until the next call.

        ~b is the place of a quantised block b. See `BlockCalls.attention`.
        """
        end = position // WINDOW * _WINDOW_BLOCKS
        if end != self._quantized_end:
            low, high = sorted((max(end, _SINK_BLOCKS), max(self._quantized_end, _SINK_BLOCKS)))
            numbers = torch.arange(low, high, dtype=torch.int32)
            self._table[low:high] = ~numbers if end > self._quantized_end else self._slots[low:high]
            self._quantized_end = end
        return self._table

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None) -> Tensor:
        """Attend as in `Store`; with a `tree`, a token's result has the bits of the chain that its path is."""
        self._buffer_for(q)
        if tree is not None:
            self._attend_tree(layer, q, start, tree)
            return self._out
        at = start
        while at < start + len(q):
            end = min((at // WINDOW + 1) * WINDOW, start + len(q))
            some = slice(at - start, end - start)
            self._call(layer, q[some], self._out[some], at + 1, self._rows(at))
            at = end
        return self._out

    def attend_table(self, layer: int, q: Tensor, table: Tensor, seen: int, tree: Tree | None = None) -> Tensor:
        """Attend to the places of `table` `[kv_heads, blocks]`; see `BlockStore.attend_table`."""
        self._buffer_for(q)
        self._call(layer, q, self._out, seen, table, None if tree is None else tree.on(self.device).parents)
        return self._out

    def _rows(self, position: int) -> Tensor:
        return self.table(position).unsqueeze(0).expand(self.shape.kv_heads, -1)

    def _call(
        self, layer: int, q: Tensor, out: Tensor, seen: int, table: Tensor, parents: Tensor | None = None
    ) -> None:
        groups = self._groups.layer(layer)
        self._kernel.attend(
            self._calls.attention(self._blocks[layer], q, seen, table=table, out=out, parents=parents, groups=groups)
        )

    def _buffer_for(self, q: Tensor) -> None:
        if self._out.shape != q.shape:
            self._out = torch.empty(q.shape, dtype=q.dtype)

    def _attend_tree(self, layer: int, q: Tensor, start: int, tree: Tree) -> None:
        """Attend to a tree. Tokens behind the end of the window see it quantised, and are computed by their paths."""
        parents = tree.on(self.device).parents
        self._call(layer, q, self._out, start + 1, self._rows(start), parents)
        border = (start // WINDOW + 1) * WINDOW
        for row, token in enumerate(range(len(tree) - len(q), len(tree))):
            if start + tree.depths[token] >= border:
                self._attend_path(layer, q[row : row + 1], self._out[row : row + 1], start, tree.path_to(token))

    def _attend_path(self, layer: int, q: Tensor, out: Tensor, start: int, path: Sequence[int]) -> None:
        """Attend with one query to a path of the tree from `start` on, across the end of the window, as to a chain.

        Window and path are copied behind the ring. The window's groups are not in use until it is complete.
        """
        border = (start // WINDOW + 1) * WINDOW
        first, scratch = border - WINDOW, _SINK_BLOCKS + self._ring
        assert start + len(path) <= border + WINDOW, "a path across two borders"
        tokens = [*range(first, start), *(start + token for token in path)]
        sources = self._token_slots(tokens)
        move_tokens(self._blocks[layer], self.shape.head_dim, sources, scratch * BLOCK + torch.arange(len(tokens)))
        groups = range(max(first, SINK) // GROUP, border // GROUP)
        slots = [scratch + (group * GROUP - first) // BLOCK for group in groups]
        self._groups.quantize(layer, self._blocks[layer], group_items(self.shape.kv_heads, groups, slots))
        table = self.table(border).clone()
        behind = table[border // BLOCK :][:_WINDOW_BLOCKS]
        behind.copy_(scratch + _WINDOW_BLOCKS + torch.arange(len(behind)))
        self._call(layer, q, out, start + len(path), table.unsqueeze(0).expand(self.shape.kv_heads, -1))

    def places(self, blocks: Tensor, position: int) -> Tensor:
        """Return a table for `attend_table` of blocks of the sequence, for queries from `position` on."""
        return self.table(position)[blocks.clamp(max=len(self._table) - 1)]

    def compact(self, start: int, keep: Sequence[int]) -> None:
        """Move tokens as in `Store`; the windows that the path completes are quantised."""
        moved = [(target, source) for target, source in enumerate(keep) if target != source]
        if moved:
            targets, sources = (self._token_slots([start + at for at in some]) for some in zip(*moved, strict=True))
            move_tokens(self._blocks.flatten(0, 1), self.shape.head_dim, sources, targets)
        for layer in range(self.shape.layers):
            self._quantize(layer, start, start + len(keep))

    def _token_slots(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([self._slot(token // BLOCK) * BLOCK + token % BLOCK for token in tokens])

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values as in `Store`; those of whole windows are dequantised."""
        layers = [self._read(layer, start, end) for layer in range(self.shape.layers)]
        keys, values = (torch.stack(x) for x in zip(*layers, strict=True))
        return keys, values

    def _read(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values `[kv_heads, tokens, head_dim]`."""
        border = min(end, self._newest // WINDOW * WINDOW)
        parts = [self._read_ring(layer, start, min(end, SINK))]
        low = max(start, SINK)
        if low < border:
            groups = range(low // GROUP, -(-border // GROUP))
            both = self._groups.dequantize(layer, groups, self.dtype)
            inside = slice(low - groups[0] * GROUP, border - groups[0] * GROUP)
            parts.append(tuple(x[:, inside] for x in both))
        parts.append(self._read_ring(layer, max(low, border), end))
        keys, values = (torch.cat(x, dim=1) for x in zip(*parts, strict=True))
        return keys, values

    def _read_ring(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        blocks = range(start // BLOCK, -(-end // BLOCK)) if start < end else range(0)
        some = self._blocks[layer][:, [self._slot(block) for block in blocks]]
        inside = slice(start % BLOCK, start % BLOCK + max(end - start, 0))
        keys, values = (of(some, self.shape.head_dim).flatten(1, 2)[:, inside] for of in (keys_of, values_of))
        return keys, values

    def mean_keys(self, layer: int, start: int, end: int, chunk: int) -> Tensor:
        return self._read(layer, start, end)[0].unflatten(1, (-1, chunk)).mean(2, dtype=torch.float32)
