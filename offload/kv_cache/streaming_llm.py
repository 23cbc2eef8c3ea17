"""The StreamingLLM cache (arXiv 2309.17453): the first and the latest tokens, at positions inside the cache.

Its memory is constant. It drops the tokens in between, which is good enough to draft with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.rope import Rope, rotate
from .store import attend_stored


class StreamingCache:
    """Attends to the first `sink` tokens and to the `window` tokens before those in flight.

    Keys are kept before RoPE. Every pass numbers the tokens that it attends to from 0 and rotates them there, so no
    position exceeds the cache. Some tokens before the window are kept for rollback; a longer `truncate` starts over.
    """

    def __init__(
        self,
        shape: ModelShape,
        rope: Rope,
        sink: int,
        window: int,
        inflight: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.sink, self.window, self._most = sink, window, inflight
        self._room = sink + 2 * window + 2 * inflight  # about half of it is for rollback
        self._rope = rope
        self._length = 0
        self._dropped = 0  # tokens between the sink and the oldest of the others
        self._inflight = 0
        self._seen: slice = slice(0, 0)  # the window and the in-flight tokens in the buffer
        size = (shape.layers, shape.kv_heads, self._room, shape.head_dim)
        self._keys, self._values = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))

    @property
    def length(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """Return the bytes of keys and values."""
        return self._keys.nbytes + self._values.nbytes

    def begin(self, tokens: int) -> None:
        stored = self._length - self._dropped
        assert 0 < tokens <= self._most, f"{tokens} tokens at once where {self._most} are the most"
        if stored + tokens > self._room:
            stored = self._compact()
        self._inflight = tokens
        self._seen = slice(max(stored - self.window, min(self.sink, stored)), stored + tokens)
        attended = min(self.sink, stored) + self._seen.stop - self._seen.start
        self._positions = self._rope.rows(0, attended)

    def _compact(self) -> int:
        """Drop tokens behind the sink, except a window and some for rollback; return how many tokens are left."""
        stored = self._length - self._dropped
        kept = self.window + (self._room - self.sink - self.window) // 4
        source = slice(stored - kept, stored)
        for tensor in (self._keys, self._values):
            tensor[:, :, self.sink : self.sink + kept] = tensor[:, :, source].clone()
        self._dropped += source.start - self.sink
        return self.sink + kept

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new = slice(self._seen.stop - self._inflight, self._seen.stop)
        keys, values = self._keys[layer], self._values[layer]
        keys[:, new], values[:, new] = k.transpose(0, 1), v.transpose(0, 1)
        sink = min(self.sink, new.start)
        keys, values = (torch.cat((x[:, :sink], x[:, self._seen]), dim=1) for x in (keys, values))
        cos, sin = self._positions
        keys = rotate(keys, (cos.squeeze(1), sin.squeeze(1)))
        return attend_stored(rotate(q, (cos[-len(q) :], sin[-len(q) :])), keys, values)

    def commit(self) -> None:
        self._length += self._inflight
        self._inflight = 0

    def skip(self, length: int) -> None:
        """Continue at position `length`, at least the committed one, with the sink alone as if it had been run.

        Committed tokens behind the sink are dropped.
        """
        assert length >= self._length >= min(self.sink, length), f"cannot skip from {self._length} to {length}"
        self._dropped = max(length - self.sink, 0)
        self._length, self._inflight = length, 0

    def truncate(self, length: int) -> int:
        assert 0 <= length <= self._length, f"cannot truncate {self._length} committed tokens to {length}"
        self._inflight = 0
        # Unless a full window is left, or nothing was dropped, queries would see fewer tokens than they should.
        if self._dropped and length < self._dropped + self.sink + self.window:
            length = self._dropped = 0
        self._length = length
        return length
