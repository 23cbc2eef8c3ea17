"""Keys and values of the newest tokens in the native kernel's blocks, attended to in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.rope import Rows, rotate
from ..kernels.native.calls import BlockCalls
from ..kernels.native.kernel import Kernel
from ..kernels.native.structs import BLOCK, PIECE
from .block_store import BlockStore
from .tree_attention import Tree


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
        found = []
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
            found.append(out.clone())
        return found[0] if len(found) == 1 else torch.cat(found)

    def _numbers(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last) % self._count

    def _places_of(self, positions: Tensor) -> Tensor:
        return positions % (self._count * BLOCK)

    def copy(self, source: BlockRing, start: int, end: int) -> None:
        self.write(start, *source.read(start, end))
