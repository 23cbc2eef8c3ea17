"""The KV cache protocol and the full cache, its first answer.

The model asks the cache to attend; positions, and so the rotation of keys and queries, are the cache's business,
because a cache that drops tokens (StreamingLLM, H2O) places the rest at positions of its own.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .attention import attend, attend_causal, merge
from .context import Watermarks
from .rope import Rope, rotate
from .shape import ModelShape

QUERIES = 64  # rows of a pass whose queries are kept: more than one verification has


class KVCache(Protocol):
    """Keys and values of the committed tokens, and attention over them.

    One forward pass is `begin`, then `attend` once a layer in order, then `commit`. Until `commit` the pass has not
    happened: an exception in between leaves the cache at its committed `length`, and the next `begin` starts over.
    """

    @property
    def length(self) -> int:
        """Committed tokens."""
        ...

    def begin(self, tokens: int) -> None:
        """Announce so many in-flight tokens, following the committed ones. Raises AssertionError beyond capacity."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the in-flight keys and values, and attend to them (causally) and to all committed ones.

        q `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]`, none of them rotated yet;
        returns `[tokens, heads, head_dim]`.
        """
        ...

    def commit(self) -> None:
        """The in-flight tokens are part of the sequence from now on."""
        ...

    def truncate(self, length: int) -> int:
        """Roll back to the first `length` tokens, at most the committed length.

        Returns how many are left: fewer where the cache has dropped what it would need, and has to start over.
        """
        ...


def attend_stored(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend to stored keys and values, of which the last are the in-flight tokens' own: causally to those.

    q `[tokens, heads, head_dim]`, keys and values `[kv_heads, at least tokens, head_dim]`, rotated; returns as q.
    """
    tokens, start = len(q), keys.shape[1] - len(q)
    if tokens == 1:  # a lone token sees everything, itself included: nothing to mask, one part
        return attend(q, keys, values).out
    parts = [attend_causal(q, keys[:, start:], values[:, start:])]
    if start > 0:
        parts.append(attend(q, keys[:, :start], values[:, :start]))
    return merge(parts).out


class FullCache:
    """Every key and value of one sequence, preallocated for `capacity` tokens on one device.

    `rope` is the sequence's; all of its caches share it. `marks` tells those who copy from it what has changed.
    """

    def __init__(self, shape: ModelShape, rope: Rope, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self.rope = rope
        self.marks = Watermarks()
        self._length = 0
        self._inflight = 0
        self._heads = shape.heads
        self._rows: tuple[Tensor, Tensor] | None = None
        # Not zeroed: memory that is never reached is never touched, so an early end costs nothing.
        size = (shape.layers, shape.kv_heads, capacity, shape.head_dim)
        self._keys, self._values = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))
        self._queries: Tensor | None = None
        self._kept, self._queried = 0, -1

    @property
    def length(self) -> int:
        return self._length

    def begin(self, tokens: int) -> None:
        end = self._length + tokens
        assert tokens > 0 and end <= self.capacity, f"{end} tokens in a cache of {self.capacity}"
        self._inflight = tokens
        self._kept = min(tokens, QUERIES)
        self._rows = self.rope.rows(self._length, end)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start, end = self._length, self._length + self._inflight
        keys, values = self._keys[layer], self._values[layer]
        keys[:, start:end] = rotate(k, self._rows).transpose(0, 1)
        values[:, start:end] = v.transpose(0, 1)
        q = rotate(q, self._rows)
        if self._queries is not None:
            self._queries[layer, : self._kept] = q[-self._kept :]
        return attend_stored(q, keys[:, :end], values[:, :end])

    def commit(self) -> None:
        self._length += self._inflight
        self._inflight = 0
        self._queried = self._length if self._queries is not None else -1

    def truncate(self, length: int) -> int:
        assert 0 <= length <= self._length, f"cannot truncate {self._length} committed tokens to {length}"
        self._length = length
        self._inflight = 0
        self.marks.lower(length)
        return length

    def keep_queries(self) -> None:
        """From the next pass on, keep its newest queries for `query`."""
        if self._queries is None:
            layers, _, _, head_dim = self._keys.shape
            size = (layers, QUERIES, self._heads, head_dim)
            self._queried = -1
            self._queries = torch.empty(size, dtype=self._keys.dtype, device=self._keys.device)

    def query(self) -> Tensor | None:
        """The rotated queries `[layers, heads, head_dim]` of the newest committed token.

        None if no pass has kept it: then it was run before `keep_queries`, or has been rolled back to from too far.
        """
        behind = self._queried - self._length
        if self._queries is None or not 0 <= behind < self._kept:
            return None
        return self._queries[:, self._kept - 1 - behind]

    def stored(self) -> tuple[Tensor, Tensor]:
        """Views of the rotated keys and the values of all committed tokens, `[layers, kv_heads, length, head_dim]`."""
        return self._keys[:, :, : self._length], self._values[:, :, : self._length]
