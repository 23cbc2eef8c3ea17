"""Keys and values in the native kernel's blocks of 16 tokens, in host memory: all tokens, or a ring of the newest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.rope import Rows, rotate
from ..kernels.native.calls import BlockCalls
from ..kernels.native.checks import require
from ..kernels.native.kernel import Kernel
from ..kernels.native.kv_groups import Groups
from ..kernels.native.layout import keys_of, mean_keys, move_tokens, values_of, write_blocks
from ..kernels.native.structs import BLOCK, PIECE, Sequence
from ..settings.method_sizes import KEPT_QUERIES
from .host_memory import copy_bytes, host_memory
from .store import ALL, DeviceStore
from .tree_attention import Tree


class BlockStore(DeviceStore):
    """A store that the native kernel attends to in place, whole or by a block table."""

    least_chunk = BLOCK
    _table: Any = None  # the block number of each block of the sequence; None: they lie in order
    _rows: Tensor | None = None  # the same for each KV head

    def __init__(self, kernel: Kernel, shape: ModelShape, capacity: int, dtype: torch.dtype) -> None:
        blocks = -(-capacity // BLOCK)
        memory = host_memory((shape.layers, shape.kv_heads, blocks, 2 * BLOCK * shape.head_dim), dtype)
        self._set_memory(kernel, shape, dtype, memory, BlockCalls(shape, blocks))

    def _set_memory(
        self, kernel: Kernel, shape: ModelShape, dtype: torch.dtype, blocks: Tensor, calls: BlockCalls
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device("cpu")
        self.kernel = self._kernel = kernel
        self._blocks, self.calls = blocks, calls
        self._layers = blocks.unbind()
        self._rotated, self._out = (torch.empty(0, dtype=dtype) for _ in range(2))

    def append(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, stored: int = 0) -> Tensor:
        self._rotated = _buffer_for(self._rotated, q)
        rotated, table = self._rotated[: len(q)], self._table
        call = self.calls.append(self._layers[layer], start, q, k, v, rows, rotated, stored, table)
        self._kernel.append(call)
        return rotated

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        """Attend as in `Store`; with a `tree`, a token's result has the bits of its path as a chain."""
        return self.attend_table(layer, q, self._rows, start + 1, tree, lse)

    def observe(self, layer: int, q: Tensor, start: int, lse: Tensor, received: Tensor) -> None:
        self._kernel.observe(self.calls.observation(self._layers[layer], q, start + 1, lse, received, self._rows))

    def attend_table(
        self,
        layer: int,
        q: Tensor,
        table: Tensor | None,
        seen: int,
        tree: Tree | None = None,
        lse: Tensor | None = None,
        groups: Groups | None = None,
        window: int = 0,
    ) -> Tensor:
        """Attend to the blocks of `table` `[kv_heads, blocks]` (int32, contiguous rows), in its order; None: to all.

        The first token sees the first `seen` tokens of that order, each further token one more. With a `tree`, whose
        tokens come behind the first `seen - 1` of that order, queries are as in `attend`. An entry ~b is block b of
        quantised `groups`. `lse` as in `attend`, `window` as of `BlockCalls.attention`.
        """
        parents = None if tree is None else tree.on(self.device).parents
        self._out = _buffer_for(self._out, q)
        out = self._out[: len(q)]
        more: dict[str, Any] = {"table": table, "out": out, "lse": lse, "parents": parents, "groups": groups}
        call = self.calls.attention(self._layers[layer], q, seen, window=window, **more)
        self._kernel.attend(call)
        return out

    def sequence(
        self, tokens: int, start: int, seen: int, rows: Rows, tree: Tree | None, stored: int = 0, table: Any = None
    ) -> Sequence:
        """Return a pass's part over this store, as the kernel takes it; `rows` and the table outlive it.

        Arguments are those of `append` and `attend_table`; the `table` `[layers, kv_heads, blocks]` is of all layers.
        """
        item, places = self.dtype.itemsize, self._table
        capacity = self.calls.tokens if places is None else len(places) * BLOCK
        require(0 <= stored <= tokens and 0 <= start <= capacity - tokens and seen >= 1, "tokens beyond the last block")
        sequence = Sequence(kv=self._blocks.data_ptr(), start=start, seen=seen, tokens=tokens, stored=stored)
        sequence.layer_stride, sequence.head_stride = (item * stride for stride in self._blocks.stride()[:2])
        sequence.cos, sequence.sin = (x.data_ptr() for x in rows)
        if places is not None:
            sequence.places = sequence.table = places.data_ptr()
        if table is not None:
            sequence.table, (sequence.table_layer, sequence.table_stride) = table.data_ptr(), table.stride()[:2]
        if tree is not None:
            parents = tree.on(self.device).parents
            sequence.parents, sequence.nodes = parents.data_ptr(), len(parents)
        return sequence

    def layer(self, index: int) -> Tensor:
        """Return a layer's blocks `[kv_heads, blocks, 2 * 16 * head_dim]`, not to be written to."""
        return self._layers[index]

    def places(self, blocks: Tensor, position: int) -> Tensor:
        """Return a table for `attend_table` of blocks of the sequence, for queries from `position` on."""
        return blocks

    def move(self, targets: Tensor, sources: Tensor) -> None:
        both = self._places_of(sources), self._places_of(targets)
        move_tokens(self._blocks.flatten(0, 1), self.shape.head_dim, *both)

    def read(self, start: int, end: int, layers: slice = ALL) -> tuple[Tensor, Tensor]:
        first, last = start // BLOCK, -(-end // BLOCK)
        some, at = (
            self._blocks[layers][:, :, self._numbers(first, last)],
            slice(start - first * BLOCK, end - first * BLOCK),
        )
        both = (of(some, self.shape.head_dim).flatten(2, 3) for of in (keys_of, values_of))
        keys, values = (x[:, :, at] for x in both)
        return keys, values

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        positions = self._places_of(torch.arange(start, start + keys.shape[2]))
        write_blocks(
            self._blocks.flatten(0, 1), self.shape.head_dim, positions, keys.flatten(0, 1), values.flatten(0, 1)
        )

    def dump(self, start: int, end: int) -> Tensor:
        assert start % BLOCK == end % BLOCK == 0, "tokens are copied in whole blocks"
        some = self._blocks[:, :, self._numbers(start // BLOCK, end // BLOCK)]
        return some.clone(memory_format=torch.contiguous_format)

    def load(self, start: int, kv: Tensor) -> None:
        assert start % BLOCK == 0, "tokens are copied in whole blocks"
        numbers = self._numbers(start // BLOCK, start // BLOCK + kv.shape[2])
        if isinstance(numbers, slice):
            copy_bytes(self._blocks[:, :, numbers], kv)
        else:
            self._blocks[:, :, numbers] = kv

    def _numbers(self, first: int, last: int) -> slice | Tensor:
        """Return where blocks `first` to `last - 1` of the sequence lie, as an index."""
        return slice(first, last)

    def _places_of(self, positions: Tensor) -> Tensor:
        """Return where tokens lie, counted as the blocks lie."""
        return positions

    def put(self, rows: Tensor, chunks: Tensor, size: int, keys: Tensor, values: Tensor) -> None:
        new = torch.empty((len(rows), size // BLOCK, self._blocks.shape[-1]), dtype=self.dtype)
        write_blocks(new, self.shape.head_dim, torch.arange(size), keys, values)
        self._blocks.flatten(0, 1)[rows.unsqueeze(1), self._blocks_of(chunks, size)] = new

    def _blocks_of(self, chunks: Tensor, size: int) -> Tensor:
        """Return where the blocks of chunks `[n]` of `size` tokens lie, `[n, blocks]`."""
        blocks = chunks.unsqueeze(1) * (size // BLOCK) + torch.arange(size // BLOCK)
        return self._places_of(BLOCK * blocks) // BLOCK

    def new_device_store(self, capacity: int) -> BlockStore:
        return BlockStore(self._kernel, self.shape, capacity, self.dtype)

    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        some = self._blocks.flatten(0, 1)[rows.unsqueeze(1), self._blocks_of(chunks, size)]
        keys, values = (of(some, self.shape.head_dim).flatten(1, 2) for of in (keys_of, values_of))
        return keys, values

    def mean_keys(self, layer: int, start: int, end: int, chunk: int) -> Tensor:
        assert start % BLOCK == end % BLOCK == chunk % BLOCK == 0, "chunks are whole blocks"
        some = self._blocks[layer][:, self._numbers(start // BLOCK, end // BLOCK)]
        means = mean_keys(some, self.shape.head_dim)
        return means.unflatten(1, (-1, chunk // BLOCK)).mean(2)


def _buffer_for(buffer: Tensor, like: Tensor) -> Tensor:
    """Return the buffer, or a new one, with room for the rows of `like`, and for KEPT_QUERIES at least."""
    size = max(len(like), KEPT_QUERIES), *like.shape[1:]
    return buffer if buffer.shape == size else torch.empty(size, dtype=like.dtype)


class BlockRing(BlockStore):
    """A store of the newest tokens: block b of the sequence is at b % blocks.

    The kernel reads from a multiple of PIECE on, so that its sums are in an order that positions alone determine: a
    token's result has the same bits in every pass. What lies before the window weighs nothing.
    """

    def __init__(self, kernel: Kernel, shape: ModelShape, room: int, dtype: torch.dtype) -> None:
        self._windows = [shape.spec(layer).window for layer in range(shape.layers)]
        self.room = room
        self._most = self.room - max(self._windows)  # tokens that are stored at once
        self._count = -(-self.room // BLOCK) + 1  # the oldest and the newest may be in part in use
        # Zeros: the kernel multiplies values before the window by 0, and uninitialised memory may be NaN.
        blocks = torch.zeros((shape.layers, shape.kv_heads, self._count, 2 * BLOCK * shape.head_dim), dtype=dtype)
        self._set_memory(kernel, shape, dtype, blocks, BlockCalls(shape, self._count))
        self._table = torch.empty(0, dtype=torch.int32)

    @property
    def nbytes(self) -> int:
        return self._blocks.nbytes

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rows: Rows,
        end: int,
        tree: Tree | None = None,
        held: int = 0,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Store and attend as `PlainRing.run`."""
        if end + len(q) > len(self._table) * BLOCK:
            self._table = self._numbers(0, 2 * -(-(end + len(q)) // BLOCK)).to(torch.int32)
        outs = []
        # More tokens at once would overwrite keys that are needed, if they are not all there.
        most = len(q) if tree is not None or end + len(q) <= self.room else self._most
        for at in range(0, len(q), most):
            some = slice(at, at + most)
            angles, part = (rows[0][some], rows[1][some]), None if lse is None else lse[some]
            if k is None or v is None:
                rotated = rotate(q[some], angles)
            else:
                rotated = self.append(layer, end + at, q[some], k[some], v[some], angles)
            first = end + at - held  # the position of the first token in flight
            base = max(first - self._windows[layer] + 1, 0) // PIECE * PIECE
            table = self._table[base // BLOCK :].expand(self.shape.kv_heads, -1)
            out = self.attend_table(layer, rotated, table, first + 1 - base, tree, part, window=self._windows[layer])
            outs.append(out.clone())
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _numbers(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last) % self._count

    def _places_of(self, positions: Tensor) -> Tensor:
        return positions % (self._count * BLOCK)

    def copy(self, source: BlockRing, start: int, end: int) -> None:
        self.write(start, *source.read(start, end))
