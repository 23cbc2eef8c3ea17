"""Keys and values of the newest tokens in the native kernel's blocks, attended to in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.rope import Rows, rotate
from ..kernels.native.calls import BlockCalls
from ..kernels.native.kernel import Kernel
from ..kernels.native.layout import key_view, move_tokens, value_view
from ..kernels.native.library import BLOCK, PIECE
from .tree_attention import Tree


class BlockRing:
    """Blocks `[layers, kv_heads, blocks, 2 * 16 * head_dim]`; block b of the sequence is at b % blocks.

    The kernel reads from a multiple of PIECE on, so that its sums are in an order that positions alone determine: a
    token's result has the same bits in every pass. What lies before the window weighs nothing.
    """

    def __init__(self, kernel: Kernel, shape: ModelShape, room: int, dtype: torch.dtype) -> None:
        self._kernel, self._shape = kernel, shape
        self._windows = [shape.spec(layer).window for layer in range(shape.layers)]
        self.room = room
        self._most = self.room - max(self._windows)  # tokens that are stored at once
        self._count = -(-self.room // BLOCK) + 1  # the oldest and the newest may be in part in use
        # Zeros: the kernel multiplies values before the window by 0, and uninitialised memory may be NaN.
        size = (shape.layers, shape.kv_heads, self._count, 2 * BLOCK * shape.head_dim)
        self._blocks = torch.zeros(size, dtype=dtype)
        self._calls = BlockCalls(shape, self._count)
        self._table = torch.empty(0, dtype=torch.int32)  # where each block of the sequence is

    @property
    def nbytes(self) -> int:
        """Return the bytes of keys and values."""
        return self._blocks.nbytes

    def attend(
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
        """Store and attend as `PlainRing.attend`."""
        self._reach(end + len(q))
        if tree is not None:
            return self._attend(layer, q, k, v, rows, end, tree, held, lse)
        found = []
        # More tokens at once would overwrite keys that are needed, if they are not all there.
        most = len(q) if end + len(q) <= self.room else self._most
        for first in range(0, len(q), most):
            some = slice(first, first + most)
            angles = tuple(x[some] for x in rows)
            part = None if lse is None else lse[some]
            both = (None, None) if k is None else (k[some], v[some])
            found.append(self._attend(layer, q[some], *both, angles, end + first, lse=part))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _attend(
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
        blocks, window = self._blocks[layer], self._windows[layer]
        rotated, out = (torch.empty(q.shape, dtype=q.dtype) for _ in range(2))
        if k is None:
            rotated = rotate(q, rows)
        else:
            call = self._calls.append(blocks, end, q, k, v, rows, rotated, table=self._table)
            self._kernel.append(call, q, k, v, rotated, self._table)
        first = end - held  # the position of the first token in flight
        base = max(first - window + 1, 0) // PIECE * PIECE
        table = self._table[base // BLOCK :].expand(self._shape.kv_heads, -1)
        parents = None if tree is None else tree.on(q.device).parents
        more: dict[str, Any] = {"table": table, "out": out, "lse": lse, "parents": parents, "window": window}
        call = self._calls.attention(blocks, rotated, first + 1 - base, **more)
        self._kernel.attend(call, rotated, table, out, lse)
        return out

    def _reach(self, tokens: int) -> None:
        """Extend the table to so many tokens."""
        if tokens > len(self._table) * BLOCK:
            blocks = 2 * -(-tokens // BLOCK)
            self._table = (torch.arange(blocks) % self._count).to(torch.int32)

    def _places(self, positions: Tensor) -> Tensor:
        """Return where tokens lie, counted as the blocks lie."""
        return positions % (self._count * BLOCK)

    def dump(self, start: int, end: int) -> Tensor:
        """Return a copy of whole blocks, as `BlockStore.dump` of these layers."""
        assert start % BLOCK == end % BLOCK == 0, "tokens are copied in whole blocks"
        return self._blocks[:, :, torch.arange(start // BLOCK, end // BLOCK) % self._count]

    def load(self, start: int, kv: Tensor) -> None:
        """Store what `dump` returned, from position `start` on."""
        assert start % BLOCK == 0, "tokens are copied in whole blocks"
        self._blocks[:, :, (start // BLOCK + torch.arange(kv.shape[2])) % self._count] = kv

    def move(self, start: int, keep: Sequence[int]) -> None:
        """Move the tokens at `start + keep[i]` to `start + i`, for increasing `keep`."""
        sources, targets = start + torch.tensor(keep, dtype=torch.long), start + torch.arange(len(keep))
        both = self._places(sources), self._places(targets)
        move_tokens(self._blocks.flatten(0, 1), self._shape.head_dim, *both)

    def copy(self, source: BlockRing, start: int, end: int) -> None:
        """Copy the tokens from position `start` to `end - 1` from another ring."""
        positions, head_dim = torch.arange(start, end), self._shape.head_dim
        to, by = (ring._places(positions) for ring in (self, source))
        (to_block, to_token), (by_block, by_token) = ((x // BLOCK, x % BLOCK) for x in (to, by))
        ours, theirs = (ring._blocks.flatten(0, 1) for ring in (self, source))
        key_view(ours, head_dim)[:, to_block, to_token] = key_view(theirs, head_dim)[:, by_block, by_token]
        ours, theirs = value_view(ours, head_dim), value_view(theirs, head_dim)
        if ours.dtype == torch.float32:
            ours[:, to_block, to_token] = theirs[:, by_block, by_token]
        else:
            ours[:, to_block, to_token // 2, to_token % 2] = theirs[:, by_block, by_token // 2, by_token % 2]
