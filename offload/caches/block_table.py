"""The retrieval cache on a CPU: a block table over the full cache's blocks, attended to in place, without a copy."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..architecture.kv_formats import BLOCK, GROUP
from ..kernels.native.kv_groups import Groups, kv_format, quantize_call
from ..kernels.native.recording import PassInputs
from ..memory.quantized_groups import GroupMemory
from ..memory.store import append
from ..memory.tree_attention import Tree
from ..settings.kv_formats import KV_FORMATS
from .selected import InPlaceCache


def blocks_of(chunks: Tensor, each: int, first: int, end: int) -> Tensor:
    """Return the blocks of chunks `[rows, chunks]`, `each` of one, and behind them those from `first` to `end` - 1."""
    blocks = (chunks.unsqueeze(-1) * each + torch.arange(each)).flatten(1)
    return torch.cat((blocks, torch.arange(first, end).expand(len(chunks), -1)), dim=1)


class TableCache(InPlaceCache):
    """A table of the block numbers of the selected chunks and of the tail.

    In another format than EXACT, chunks are quantised copies, made when they are selected for the first time, and kept
    as long as their tokens are in the sequence.
    """

    def _allocate(self) -> None:
        """Chunks are whole blocks or groups, and the full cache's store is one of blocks."""
        store, kind = self._full.store, self._kind
        assert self.chunk % max(BLOCK, KV_FORMATS[kind].run) == 0, "chunks are whole blocks or groups"
        self._store: Any = store  # BlockStore or QuantizedStore
        self._groups: list[Groups] = []  # of each layer; none of an exact table
        if not KV_FORMATS[kind].is_plain:
            memory = GroupMemory(store.shape, self._full.capacity, kind, store.device).memory
            self._groups = [Groups(layer, kv_format(kind)) for layer in memory.unbind()]
            self._known = torch.zeros(memory.shape[:3], dtype=torch.bool)  # which groups are quantised
        self._blocks = torch.empty(0, dtype=torch.int32)  # [layers, kv_heads, blocks]
        self._table = self._blocks  # of the pass: their places in the store

    def _use(self, chosen: Tensor, chunks: int) -> None:
        each, start, shape = self.chunk // BLOCK, chunks * self.chunk, self._store.shape
        self.selection = chosen.sort(dim=-1).values
        table = blocks_of(self.selection, each, start // BLOCK, -(-(start + self._room) // BLOCK))
        table = table.view(shape.layers, shape.kv_heads, -1)
        if self._blocks.shape != table.shape:  # else it stays where it is, for recorded passes
            self._blocks = torch.empty(table.shape, dtype=torch.int32)
        self._blocks.copy_(table)
        if self._groups:
            copies = self._blocks[:, :, : self.selection.shape[1] * self.chunk // BLOCK]
            self._quantize(copies[:, :, :: GROUP // BLOCK] // (GROUP // BLOCK))
            copies.bitwise_not_()

    def _quantize(self, groups: Tensor) -> None:
        """Quantise those of the groups `[layers, kv_heads, n]` that are not yet."""
        wanted = torch.zeros_like(self._known).scatter_(2, groups.long(), True) & ~self._known
        for layer in wanted.flatten(1).any(1).nonzero().flatten().tolist():
            head, group = wanted[layer].nonzero(as_tuple=True)
            items = torch.stack((head, group * (GROUP // BLOCK), group), dim=1).to(torch.int32)
            call = quantize_call(self._store.layer(layer), self._groups[layer], items, self._store.shape.head_dim)
            self._store.kernel.quantize(call)
        self._known |= wanted

    def _invalidate(self, unchanged: int) -> bool:
        if self._groups:
            self._known[:, :, unchanged // GROUP :] = False
        return super()._invalidate(unchanged)

    @property
    def selects_for_free(self) -> bool:
        return super().selects_for_free and not self._groups

    def begin(self, tokens: int, tree: Tree | None = None) -> None:
        super().begin(tokens, tree)
        self._table = self._store.places(self._blocks, self.length)

    def begin_recorded(self, tokens: int, tree: Tree | None = None) -> tuple[Hashable, PassInputs]:
        self.begin(tokens, tree)
        key = self._table.data_ptr(), self._table.shape, tree is None
        return key, self._inputs(self.seen, self.stored)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, lse: Tensor | None = None) -> Tensor:
        q = append(self._store, layer, self.start, q, k, v, self.rows_of(layer), self.stored)
        return self._attend(layer, q, self.seen, self.tree, lse)

    def _attend(self, layer: int, q: Tensor, seen: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        more = (self._groups[layer],) if self._groups else ()
        return self._store.attend_table(layer, q, self._table[layer], seen, tree, lse, *more)
