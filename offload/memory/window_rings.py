"""The layers that attend to a window: keys and values of the newest tokens alone, in a ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.rope import Rope, Rows, rows_of
from ..kernels.native import Kernel
from .block_ring import BlockRing
from .plain_ring import PlainRing
from .tree_attention import Tree


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
        self._ring = self._new_ring(min(shape.window_room, capacity or shape.window_room))
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
        return self._first <= max(length - self._longest + 1, 0)

    def clear(self) -> None:
        """Begin another sequence."""
        self._first = 0

    def begin(self, start: int, tokens: int, tree: Tree | None = None, held: int = 0) -> None:
        """Begin a pass over `tokens` tokens behind the `start` committed ones, or behind `held` ones of a tree."""
        assert self.covers(start), f"a pass behind {start} tokens, whose windows have been overwritten"
        self._start, self._held, self._tree, self._next = start, held, tree, (-1, 0)
        self._tokens = tokens
        if tree is None:
            self._make_room(start, start + tokens, tokens if self._lends else 0)
            self._rows = self._rope.rows(start, start + tokens)
        else:
            self._make_room(start + held, start + len(tree), len(tree))
            depths = tree.on(self._device).depths[held:]
            rows = self._rope.rows(start, start + tree.depth)
            self._rows = tuple(x.index_select(0, depths) for x in rows)
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
        rows = rows_of(self.shape, layer, tuple(x[done : done + len(q)] for x in self._rows))
        return self._ring.attend(layer, q, k, v, rows, self._start + self._held + done, self._tree, self._held, lse)

    def compact(self, start: int, keep: Sequence[int]) -> None:
        """Move the tokens at `start + keep[i]` to `start + i`, for increasing `keep`."""
        self._ring.move(start, keep)

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
