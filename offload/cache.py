"""The KV cache protocol and the full cache, its first answer.

The model asks the cache to attend; positions, and so the rotation of keys and queries, are the cache's business,
because a cache that drops tokens (StreamingLLM, H2O) places the rest at positions of its own.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .attention import attend, attend_causal, merge
from .rope import Rope, rotate
from .shape import ModelShape


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

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` tokens; `length` is at most the committed length."""
        ...


class FullCache:
    """Every key and value of one sequence, preallocated for `capacity` tokens on one device.

    `rope` is the sequence's; all of its caches share it.
    """

    def __init__(self, shape: ModelShape, rope: Rope, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self._length = 0
        self._inflight = 0
        self._rope = rope
        self._rows: tuple[Tensor, Tensor] | None = None
        # Not zeroed: memory that is never reached is never touched, so an early end costs nothing.
        size = (shape.layers, shape.kv_heads, capacity, shape.head_dim)
        self._keys, self._values = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))

    @property
    def length(self) -> int:
        return self._length

    def begin(self, tokens: int) -> None:
        end = self._length + tokens
        assert tokens > 0 and end <= self.capacity, f"{end} tokens in a cache of {self.capacity}"
        self._inflight = tokens
        self._rows = self._rope.rows(self._length, end)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start, end = self._length, self._length + self._inflight
        keys, values = self._keys[layer], self._values[layer]
        keys[:, start:end] = rotate(k, self._rows).transpose(0, 1)
        values[:, start:end] = v.transpose(0, 1)
        q = rotate(q, self._rows)
        if self._inflight == 1:  # a lone token sees everything, itself included: nothing to mask, one part
            return attend(q, keys[:, :end], values[:, :end]).out
        parts = [attend_causal(q, keys[:, start:end], values[:, start:end])]
        if start > 0:
            parts.append(attend(q, keys[:, :start], values[:, :start]))
        return merge(parts).out

    def commit(self) -> None:
        self._length += self._inflight
        self._inflight = 0

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self._length, f"cannot truncate {self._length} committed tokens to {length}"
        self._length = length
        self._inflight = 0
