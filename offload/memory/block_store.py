"""Keys and values in the native kernel's blocks of 16 tokens, in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..kernels.native.calls import BlockCalls
from ..kernels.native.kernel import Kernel
from ..kernels.native.kv_groups import Groups
from ..kernels.native.layout import keys_of, mean_keys, move_tokens, values_of, write_blocks
from ..kernels.native.library import BLOCK
from ..settings.method_sizes import KEPT_QUERIES
from .host_memory import host_memory
from .store import DeviceStore, gather_chunks
from .tree_attention import Tree


class BlockStore(DeviceStore):
    """A store that the native kernel attends to in place, whole or by a block table."""

    grain = BLOCK
    is_recordable = True

    def __init__(self, kernel: Kernel, shape: ModelShape, capacity: int, dtype: torch.dtype) -> None:
        blocks = -(-capacity // BLOCK)
        memory = host_memory((shape.layers, shape.kv_heads, blocks, 2 * BLOCK * shape.head_dim), dtype)
        self._count = blocks  # of the sequence
        self._set_memory(kernel, shape, dtype, memory, BlockCalls(shape, blocks))

    def _set_memory(
        self, kernel: Kernel, shape: ModelShape, dtype: torch.dtype, blocks: Tensor, calls: BlockCalls
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device("cpu")
        self.kernel = self._kernel = kernel
        self._blocks, self._calls = blocks, calls
        self._layers = blocks.unbind()
        self._rotated, self._out = (torch.empty(0, dtype=dtype) for _ in range(2))

    def append(
        self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: tuple[Tensor, Tensor], stored: int = 0
    ) -> Tensor:
        """Store tokens as in `Store`; of the first `stored`, already there, only queries are rotated."""
        return self._append(layer, start, q, k, v, rows, stored)

    def _append(
        self,
        layer: int,
        start: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: tuple[Tensor, Tensor],
        stored: int,
        table: Tensor | None = None,
    ) -> Tensor:
        self._rotated = _buffer_for(self._rotated, q)
        rotated = self._rotated[: len(q)]
        call = self._calls.append(self._layers[layer], start, q, k, v, rows, rotated, stored, table)
        self._kernel.append(call, q, k, v, rotated, table)
        return rotated

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        """Attend as in `Store`; with a `tree`, a token's result has the bits of its path as a chain."""
        return self._attend(layer, q, start + 1, tree=tree, lse=lse)

    def observe(self, layer: int, q: Tensor, start: int, lse: Tensor, received: Tensor) -> None:
        self._kernel.observe(self._calls.observation(self._layers[layer], q, start + 1, lse, received))

    def attend_table(
        self,
        layer: int,
        q: Tensor,
        table: Tensor,
        seen: int,
        tree: Tree | None = None,
        lse: Tensor | None = None,
        groups: Groups | None = None,
    ) -> Tensor:
        """Attend to the blocks of `table` `[kv_heads, blocks]` (int32, contiguous rows), in its order.

        The first token sees the first `seen` tokens of that order, each further token one more. With a `tree`, whose
        tokens come behind the first `seen - 1` of that order, queries are as in `attend`. An entry ~b is block b of
        quantised `groups`. `lse` as in `attend`.
        """
        return self._attend(layer, q, seen, table, tree, groups, lse)

    def _attend(
        self,
        layer: int,
        q: Tensor,
        seen: int,
        table: Tensor | None = None,
        tree: Tree | None = None,
        groups: Groups | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        parents = None if tree is None else tree.on(self.device).parents
        self._out = _buffer_for(self._out, q)
        out = self._out[: len(q)]
        more: dict[str, Any] = {"table": table, "out": out, "lse": lse, "parents": parents, "groups": groups}
        call = self._calls.attention(self._layers[layer], q, seen, **more)
        self._kernel.attend(call, q, table, out, lse, groups)
        return out

    def copy_rows(self, source: Tensor, target: Tensor) -> None:
        self._kernel.copy(source, target)

    def layer(self, layer: int) -> Tensor:
        """Return a layer's blocks `[kv_heads, blocks, 2 * 16 * head_dim]`, not to be written to."""
        return self._layers[layer]

    def places(self, blocks: Tensor, position: int) -> Tensor:
        """Return a table for `attend_table` of blocks of the sequence, for queries from `position` on."""
        return blocks

    def compact(self, start: int, keep: Sequence[int]) -> None:
        moved = [(target, source) for target, source in enumerate(keep) if target != source]
        if moved:
            targets, sources = (self._places_of(start + torch.tensor(some)) for some in zip(*moved, strict=True))
            move_tokens(self._blocks.flatten(0, 1), self.shape.head_dim, sources, targets)

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        first, last = start // BLOCK, -(-end // BLOCK)
        some, at = self._blocks[:, :, self._numbers(first, last)], slice(start - first * BLOCK, end - first * BLOCK)
        both = (of(some, self.shape.head_dim).flatten(2, 3) for of in (keys_of, values_of))
        keys, values = (x[:, :, at] for x in both)
        return keys, values

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        positions = self._places_of(torch.arange(start, start + keys.shape[2]))
        write_blocks(
            self._blocks.flatten(0, 1), self.shape.head_dim, positions, keys.flatten(0, 1), values.flatten(0, 1)
        )

    def dump(self, start: int, end: int) -> Tensor:
        return self._run(start, end - start).clone(memory_format=torch.contiguous_format)

    def load(self, start: int, kv: Tensor) -> None:
        copy_bytes(self._run(start, kv.shape[2] * BLOCK), kv)

    def _run(self, start: int, tokens: int) -> Tensor:
        """Return whole blocks, `[layers, kv_heads, blocks, 2 * 16 * head_dim]`, as they lie."""
        assert start % BLOCK == tokens % BLOCK == 0, "tokens are copied in whole blocks"
        return self._blocks[:, :, self._numbers(start // BLOCK, (start + tokens) // BLOCK)]

    def _numbers(self, first: int, last: int) -> slice | Tensor:
        """Return where blocks `first` to `last - 1` of the sequence lie, as an index."""
        return slice(first, last)

    def _places_of(self, positions: Tensor) -> Tensor:
        """Return where tokens lie, counted as the blocks lie."""
        return positions

    def put(self, rows: Tensor, chunks: Tensor, size: int, keys: Tensor, values: Tensor) -> None:
        count = size // BLOCK
        new = torch.empty((len(rows), count, self._blocks.shape[-1]), dtype=self.dtype)
        write_blocks(new, self.shape.head_dim, torch.arange(size), keys, values)
        first = self._places_of(BLOCK * (chunks.unsqueeze(1) * count + torch.arange(count)))
        self._blocks.flatten(0, 1)[rows.unsqueeze(1), first // BLOCK] = new

    def near(self, capacity: int) -> BlockStore:
        return BlockStore(self._kernel, self.shape, capacity, self.dtype)

    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        return gather_chunks(*self.read(0, self._count * BLOCK), rows, chunks, size)

    def mean_keys(self, layer: int, start: int, end: int, chunk: int) -> Tensor:
        assert start % BLOCK == end % BLOCK == chunk % BLOCK == 0, "chunks are whole blocks"
        some = self._blocks[layer][:, self._numbers(start // BLOCK, end // BLOCK)]
        means = mean_keys(some, self.shape.head_dim)
        return means.unflatten(1, (-1, chunk // BLOCK)).mean(2)


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy from host memory to where groups and blocks are.

    Within host memory in this thread: torch's threads would take cores from those that read the next tokens.
    """
    if target.device.type != "cpu":
        target.copy_(source)
        return
    np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())


def _buffer_for(buffer: Tensor, like: Tensor) -> Tensor:
    """Return the buffer, or a new one, with room for the rows of `like`, and those of any pass that can be recorded."""
    size = max(len(like), KEPT_QUERIES), *like.shape[1:]
    return buffer if buffer.shape == size else torch.empty(size, dtype=like.dtype)
