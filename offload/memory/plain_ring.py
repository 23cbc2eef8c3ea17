"""Keys and values of the newest tokens in plain tensors, attended to by torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.rope import Rows, rotate
from ..kernels.window_attention import Limits, attend_limited
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
        """Return the bytes of keys and values."""
        return self._keys.nbytes + self._values.nbytes

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
        """Store keys and values of tokens from position `end` on, and attend as `KVCache.attend`.

        `rows` are their rotations, and `lse` as there. Without k and v, they are stored already. Of a tree, whose
        tokens are the last ones, the first `held` are stored before them.
        """
        limits, first = self._limits[layer], end - held
        q, before = rotate(q, rows), self._slots(max(first - limits.window + 1, 0), end)
        stored = (self._keys[layer], self._values[layer])
        if k is None:
            k, v = (x.index_select(1, self._slots(end, end + len(q))) for x in stored)
        else:
            k, v = rotate(k, rows).transpose(0, 1), v.transpose(0, 1)
        both = [torch.cat((old.index_select(1, before), new), 1) for old, new in zip(stored, (k, v), strict=True)]
        newest = min(len(q), self.room)
        places = self._slots(end + len(q) - newest, end + len(q))
        for old, new in zip(stored, (k, v), strict=True):
            old.index_copy_(1, places, new[:, -newest:])
        return attend_limited(q, *both, limits, None if tree is None else branches_of(tree, q.device, held), lse)

    def move(self, start: int, keep: Sequence[int]) -> None:
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
