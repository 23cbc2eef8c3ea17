"""A full cache's store of quantised keys and values, which changes the answer: `--kv q8`, `q4` and `fp8`.

A token attends to quantised keys and values of all whole windows before its own, and to bf16 ones of its own window and
of the sink. That depends on its position alone, so its result has the same bits however it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import BLOCK, GROUP, SINK, WINDOW
from ..kernels.native.calls import BlockCalls
from ..kernels.native.kernel import Kernel
from ..kernels.native.layout import keys_of, move_tokens, values_of
from .block_store import BlockStore, copy_bytes
from .host_tensors import host_memory
from .quantized_groups import QuantizedGroups, group_items
from .quantized_memory import SINK_BLOCKS, WINDOW_BLOCKS, QuantizedMemory, Ring, place_in_ring, window_capacity
from .store import gather_chunks
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


class QuantizedStore(QuantizedMemory):
    """Quantised keys and values, attended to by the native kernel.

    A block's number in the order of the sequence becomes its place by a block table: that of its group where it is
    quantised, else its slot in the ring.
    """

    def __init__(
        self, kernel: Kernel, shape: ModelShape, capacity: int, dtype: torch.dtype, kind: str, layers: int | None = None
    ) -> None:
        """Keep the groups of the first `layers` layers here, or of all; a subclass has the others elsewhere."""
        self.kernel = self._kernel = kernel
        self._groups = QuantizedGroups(kernel, shape, window_capacity(capacity), kind, layers)
        # For a token at a position, and up to which block it has quantised ones; -1: it is not valid.
        self._table, self._quantized_end = torch.empty(window_capacity(capacity) // BLOCK, dtype=torch.int32), -1
        super().__init__(shape, capacity, dtype, torch.device("cpu"), kind, self._groups.memory)
        self._out = torch.empty(0, dtype=dtype)

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
        self._groups.quantize(layer, self._blocks[layer], group_items(self.shape.kv_heads, groups, slots))

    def _dequantized(self, layer: int, groups: range) -> tuple[Tensor, Tensor]:
        return self._groups.dequantize(layer, groups, self.dtype)

    def _move(self, targets: Tensor, sources: Tensor) -> None:
        move_tokens(self._blocks.flatten(0, 1), self.shape.head_dim, sources, targets)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        copy_bytes(target, source)

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

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None) -> Tensor:
        """Attend as in `Store`; with a `tree`, a token's result has the bits of the chain that its path is."""
        self._buffer_for(q)
        if tree is not None:
            self._attend_tree(layer, q, start, tree)
        else:
            self._attend_chain(layer, q, start)
        return self._out

    def _attend_chain(self, layer: int, q: Tensor, start: int) -> None:
        for at, some in runs_of_windows(start, len(q)):
            self._call(layer, q[some], self._out[some], at + 1, self._rows(at))

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
        self._call(layer, q, out, start + len(path), table.unsqueeze(0).expand(self.shape.kv_heads, -1))

    def near(self, capacity: int) -> BlockStore:
        return BlockStore(self._kernel, self.shape, capacity, self.dtype)

    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        return gather_chunks(*self.read(0, -(-self._newest // size) * size), rows, chunks, size)

    def places(self, blocks: Tensor, position: int) -> Tensor:
        """Return a table for `attend_table` of blocks of the sequence, for queries from `position` on."""
        return self.table(position)[blocks.clamp(max=len(self._table) - 1)]
