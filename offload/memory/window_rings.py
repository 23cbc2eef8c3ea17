"""The layers that attend to a window: keys and values of the newest tokens alone, in a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.rope import Rope, Rows, rotate, rows_of
from ..kernels.native import Kernel
from ..kernels.window_attention import Limits, attend_limited
from .block_store import BlockRing
from .tree_attention import Tree, branches_of


class PlainRing:
    """Keys and values `[layers, kv_heads, room, head_dim]` of the newest tokens; position p is in slot p % room."""

    def __init__(self, shape: ModelShape, room: int, dtype: torch.dtype, device: torch.device, by_row: bool) -> None:
        self._limits = [Limits(shape.spec(i).window, shape.spec(i).soft_cap, by_row) for i in range(shape.layers)]
        self.room = room
        size = (shape.layers, shape.kv_heads, self.room, shape.head_dim)
        self._keys, self._values = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

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
        """Store keys and values of tokens from position `end` on, and attend as `KVCache.attend`.

        `rows` are their rotations, and `lse` as there. Without k and v, they are stored already. Of a tree, whose
        tokens are the last ones, the first `held` are stored before them.
        """
        limits, first = self._limits[layer], end - held
        q, before = rotate(q, rows), self._slots(max(first - limits.window + 1, 0), end)
        stored = (self._keys[layer], self._values[layer])
        if k is None or v is None:
            k, v = (x.index_select(1, self._slots(end, end + len(q))) for x in stored)
        else:
            k, v = rotate(k, rows).transpose(0, 1), v.transpose(0, 1)
        keys, values = (
            torch.cat((old.index_select(1, before), new), 1) for old, new in zip(stored, (k, v), strict=True)
        )
        newest = min(len(q), self.room)
        places = self._slots(end + len(q) - newest, end + len(q))
        for old, new in zip(stored, (k, v), strict=True):
            old.index_copy_(1, places, new[:, -newest:])
        branches = None if tree is None else branches_of(tree, q.device, held)
        return attend_limited(q, keys, values, limits, branches, lse)

    def compact(self, start: int, keep: Sequence[int]) -> None:
        """Move the tokens at `start + keep[i]` to `start + i`, for increasing `keep`."""
        at = (torch.tensor(keep, dtype=torch.long, device=self._keys.device) + start) % self.room
        to = self._slots(start, start + len(keep))
        for x in (self._keys, self._values):
            x.index_copy_(2, to, x.index_select(2, at))

    def copy(self, source: PlainRing, start: int, end: int) -> None:
        """Copy the tokens from position `start` to `end - 1` from another ring."""
        to, by = self._slots(start, end), source._slots(start, end)
        for x, other in ((self._keys, source._keys), (self._values, source._values)):
            x.index_copy_(2, to, other.index_select(2, by))

    def dump(self, start: int, end: int) -> Tensor:
        """Return a copy of tokens in host memory, as `PlainStore.dump` of these layers."""
        places = self._slots(start, end)
        return torch.stack([x.index_select(2, places).cpu() for x in (self._keys, self._values)], 3)

    def load(self, start: int, kv: Tensor) -> None:
        """Store what `dump` returned, from position `start` on."""
        places = self._slots(start, start + kv.shape[2])
        for x, new in zip((self._keys, self._values), kv.unbind(3), strict=True):
            x.index_copy_(2, places, new.to(x.device))

    def _slots(self, start: int, end: int) -> Tensor:
        return torch.arange(start, end, device=self._keys.device) % self.room


class Windows:
    """Keys and values of a sequence's newest tokens, and attention over them. Layers are those with a window, numbered.

    The ring has room for the longest window and WINDOW_SLACK tokens more, or those of a larger tree; of a shorter
    sequence for all of its tokens. So a rollback of that many tokens, such as a rejected draft, loses nothing; `covers`
    says whether a longer one has.
    """

    def __init__(
        self,
        shape: ModelShape,
        rope: Rope,
        dtype: torch.dtype,
        device: torch.device,
        kernel: Kernel | None = None,
        lends: bool = False,
        capacity: int | None = None,
    ) -> None:
        """Make an empty ring for the layers of `shape`, in the native kernel's blocks where it attends to them.

        `lends`: whether other layers attend to the same keys and values, later in a pass. It then makes room for all
        keys that a pass sees. `capacity`: the tokens of the longest sequence, if that is known.
        """
        self._made_of = shape, rope, dtype, device, kernel, lends, capacity
        self.shape, self._rope, self._device = shape, rope, device
        self._ring: Any = self._new_ring(min(shape.window_room, capacity or shape.window_room))
        self._longest = max(shape.spec(layer).window for layer in range(shape.layers))
        self._first = 0  # the oldest position that has not been overwritten
        self._start, self._held = 0, 0  # of the pass: the committed tokens, and those of a tree's earlier passes
        self._tree: Tree | None = None
        self._rows: Rows | None = None  # rotations of the pass's tokens
        self._tokens = 0  # of the pass
        self._lends = lends
        self._next = (-1, 0)  # the current layer, and the number of its next token in the pass

    def _new_ring(self, room: int) -> PlainRing | BlockRing:
        shape, _, dtype, device, kernel, *_ = self._made_of
        if kernel is None or shape.caps_scores:
            return PlainRing(shape, room, dtype, device, by_row=kernel is not None)
        return BlockRing(kernel, shape, room, dtype)

    def like(self) -> Windows:
        """Return an empty ring for the same model."""
        return Windows(*self._made_of)

    @property
    def nbytes(self) -> int:
        """Return the bytes of keys and values."""
        return self._ring.nbytes

    def covers(self, length: int) -> bool:
        """Return whether all keys are there that the next token after `length` tokens sees."""
        return length == 0 or self._first <= max(length - self._longest + 1, 0)

    def clear(self) -> None:
        """Begin another sequence."""
        self._first = 0

    def begin(self, start: int, tokens: int, tree: Tree | None = None, held: int = 0) -> None:
        """Begin a pass over `tokens` tokens behind the `start` committed ones, or behind `held` ones of a tree."""
        assert self.covers(start), f"a pass behind {start} tokens, whose windows have been overwritten"
        if start + held == 0:
            self.clear()
        self._start, self._held, self._tree, self._next = start, held, tree, (-1, 0)
        self._tokens = tokens
        if tree is None:
            self._make_room(start, start + tokens, tokens if self._lends else 0)
            self._rows = self._rope.rows(start, start + tokens)
        else:
            self._make_room(start + held, start + len(tree), len(tree))
            depths = tree.on(self._device).depths[held:]
            rows = self._rope.rows(start, start + tree.depth)
            self._rows = rows[0].index_select(0, depths), rows[1].index_select(0, depths)
        self._first = max(self._first, start + held + tokens - self._ring.room)

    def _make_room(self, there: int, end: int, inflight: int = 0) -> None:
        """Move the first `there` tokens to a larger ring, if tokens up to position `end` would overwrite too many.

        `inflight` tokens must not overwrite keys that they see.
        """
        room = max(self.shape.window_room, self._longest + inflight)
        if end > self._ring.room and room > self._ring.room:
            with torch.inference_mode(False):  # an inference tensor could not be written to outside that mode
                ring = self._new_ring(room)
            if (first := max(self._first, there - self._ring.room)) < there:
                ring.copy(self._ring, first, there)
            self._ring = ring

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None = None) -> Tensor:
        """Store keys and values of the pass, or of a chunk of it, and attend; the arguments as in `KVCache.attend`."""
        done = self._next[1] if self._next[0] == layer and self._next[1] < self._tokens else 0
        self._next = layer, done + len(q)
        assert self._rows is not None
        cos, sin = (x[done : done + len(q)] for x in self._rows)
        rows = rows_of(self.shape, layer, (cos, sin))
        return self._ring.run(layer, q, k, v, rows, self._start + self._held + done, self._tree, self._held, lse)

    def compact(self, start: int, keep: Sequence[int]) -> None:
        self._ring.compact(start, keep)

    @property
    def has_blocks(self) -> bool:
        """Return whether `dump` and `load` are of the native kernel's blocks."""
        return isinstance(self._ring, BlockRing)

    def holds(self, start: int) -> bool:
        """Return whether the tokens from position `start` on have not been overwritten."""
        return self._first <= start

    def dump(self, start: int, end: int) -> Tensor:
        """Return a copy of tokens that are there, as the `dump` of a store for these layers."""
        return self._ring.dump(start, end)

    def load(self, start: int, end: int, kv: Tensor) -> None:
        """Store what `dump` returned of the tokens from position `start` to `end - 1`."""
        if start == 0:
            self.clear()
        self._make_room(start, end)
        self._ring.load(start, kv)
        self._first = max(self._first, end - self._ring.room)

    def copy(self, source: Windows, start: int, end: int) -> None:
        """Copy the tokens from position `start` to `end - 1` from those of the same model, as far as they are there."""
        self._make_room(start, end)
        wanted, start = start, max(start, end - self._ring.room, source._first)
        if wanted < end:
            self._ring.copy(source._ring, start, end)
            self._first = max(self._first, end - self._ring.room, start if start > wanted else 0)
