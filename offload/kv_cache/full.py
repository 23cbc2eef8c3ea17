"""The KV cache protocol and the full cache, its first answer.

The model asks the cache to attend; positions, and so the rotation of keys and queries, are the cache's business,
because a cache that drops tokens (StreamingLLM, H2O) places the rest at positions of its own.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..architecture.rope import Rope
from ..sequence import Watermarks
from .store import Store

QUERIES = 64  # rows of a pass whose queries are kept: more than one verification has


class Attends(Protocol):
    """What a decoder layer asks for its attention."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the in-flight keys and values, and attend to them (causally) and to all committed ones.

        q `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]`, none of them rotated yet;
        returns `[tokens, heads, head_dim]`.
        """
        ...


class KVCache(Attends, Protocol):
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

    def commit(self) -> None:
        """The in-flight tokens are part of the sequence from now on."""
        ...

    def truncate(self, length: int) -> int:
        """Roll back to the first `length` tokens, at most the committed length.

        Returns how many are left: fewer where the cache has dropped what it would need, and has to start over.
        """
        ...


class FullCache:
    """Every key and value of one sequence of up to `capacity` tokens, in a store.

    `rope` is the sequence's; all of its caches share it. `marks` tells those who copy from the store what has changed;
    `writes` counts the passes, for those who use the store's room behind the committed tokens, and theirs.
    """

    def __init__(self, store: Store, rope: Rope, capacity: int) -> None:
        self.store = store
        self.capacity = capacity
        self.rope = rope
        self.marks = Watermarks()
        self.writes = 0
        self._length = 0
        self._inflight = 0
        self._rows: tuple[Tensor, Tensor] | None = None
        self._place: tuple[int, int] | None = None  # the layer that attends, and its next token's place
        self._queries: Tensor | None = None
        self._kept, self._queried = 0, -1

    @property
    def length(self) -> int:
        return self._length

    def begin(self, tokens: int, chunk: int | None = None) -> None:
        """As in `KVCache`; with `chunk`, each layer's tokens come in so many calls of `attend` as chunks there are."""
        end = self._length + tokens
        assert tokens > 0 and end <= self.capacity, f"{end} tokens in a cache of {self.capacity}"
        self.writes += 1
        self._inflight = tokens
        self._rows = self.rope.rows(self._length, end)
        self._place = None
        self.store.begin(self._length, tokens, chunk)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start = self._length if self._place is None or self._place[0] != layer else self._place[1]
        self._place = layer, start + len(q)
        rows = self._rows
        if len(q) < self._inflight:
            rows = tuple(row[start - self._length :][: len(q)] for row in rows)
        q = self.store.append(layer, start, q, k, v, rows)
        if self._queries is not None:
            self._kept = min(len(q), QUERIES)
            self._queries[layer, : self._kept] = q[-self._kept :]
        return self.store.attend(layer, q, start)

    def commit(self) -> None:
        self.store.end()
        self._length += self._inflight
        self._inflight = 0
        self._queried = self._length if self._queries is not None else -1

    def restore(self, keys: Tensor, values: Tensor) -> None:
        """Commit tokens that need not be run: their keys and values `[layers, kv_heads, tokens, head_dim]`, rotated."""
        end = self._length + keys.shape[2]
        assert end <= self.capacity, f"{end} tokens in a cache of {self.capacity}"
        self.writes += 1
        self.store.write(self._length, keys, values)
        self._length, self._inflight, self._queried = end, 0, -1

    def truncate(self, length: int) -> int:
        assert 0 <= length <= self._length, f"cannot truncate {self._length} committed tokens to {length}"
        self._length = length
        self._inflight = 0
        self.store.truncate(length)
        self.marks.lower(length)
        return length

    def keep_queries(self) -> None:
        """From the next pass on, keep its newest queries for `query`."""
        if self._queries is None:
            store = self.store
            size = (store.shape.layers, QUERIES, store.shape.heads, store.shape.head_dim)
            self._queried = -1
            self._queries = torch.empty(size, dtype=store.dtype, device=store.device)

    def query(self) -> Tensor | None:
        """The rotated queries `[layers, heads, head_dim]` of the newest committed token.

        None if no pass has kept it: then it was run before `keep_queries`, or has been rolled back to from too far.
        """
        behind = self._queried - self._length
        if self._queries is None or not 0 <= behind < self._kept:
            return None
        return self._queries[:, self._kept - 1 - behind]
