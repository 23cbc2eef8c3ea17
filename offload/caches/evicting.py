"""The base of caches of constant size, which evict tokens: a subclass chooses which ones stay.

The tokens that are kept are numbered from 0, as in StreamingLLM (arXiv 2309.17453, section 3.2), so that no position
exceeds the cache and a sequence may go on for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..architecture.rope import Rope, rows_of
from ..memory.store import DeviceStore
from ..memory.tree_attention import Tree
from .full import FullCache


class EvictingCache:
    """A KVCache that evicts down to `budget` tokens whenever its store is full, at the same positions of any sequence.

    In between, tokens are appended to a FullCache over the store, so that any kernel attends to them. What is evicted
    does not depend on how the sequence was divided into passes. Keys before RoPE and values are kept as well: an
    eviction numbers the tokens that stay anew, for each layer and KV head, and stores them again.

    A pass has at most `room` tokens. There are no trees. A rollback that an eviction has made impossible starts over.
    """

    is_intact = True
    observes = False  # whether `observe` is to be called with the attention that tokens have received

    def __init__(self, store: DeviceStore, rope: Rope, budget: int, capacity: int) -> None:
        """Make an empty cache over an empty store of `capacity` tokens, more than `budget`."""
        assert budget < capacity, "an eviction makes room"
        self.budget, self.capacity, self.every = budget, capacity, capacity - budget
        self._stored = FullCache(store, rope, capacity)  # the tokens that are kept, at their new positions
        self._rope = rope
        self._evicted = 0  # tokens
        self._settled = 0  # tokens of the sequence whose attention was observed or that were evicted: no way back
        shape = store.shape
        size = (shape.layers, capacity, shape.kv_heads, shape.head_dim)
        self._keys, self._values = (torch.empty(size, dtype=store.dtype, device=store.device) for _ in range(2))
        if (
            self.observes
        ):  # the rotated queries of the tokens that are not settled, and the log-sum-exp of their attention
            size = (shape.layers, self.every, shape.heads)
            self._queries = torch.empty((*size, shape.head_dim), dtype=store.dtype, device=store.device)
            self._lse = torch.empty(size, device=store.device)

    def keep(self, layer: int) -> Tensor:
        """Return which of the `capacity` tokens of a full store stay: increasing indices `[kv_heads, budget]`.

        They get the indices 0 to `budget` - 1; a subclass moves what it knows of them accordingly.
        """
        raise NotImplementedError

    def observe(self, layer: int, received: Tensor) -> None:
        """Observe the attention of new tokens: what each stored one has received, `[kv_heads, capacity]` in fp32.

        That is the sum of the softmax weights of all new queries of its KV head; 0 behind the last token.
        """

    def forget(self) -> None:
        """Forget everything observed: another sequence begins."""

    @property
    def store(self) -> DeviceStore:
        return self._stored.store

    def positions(self) -> Tensor:
        """Return the positions of the pass's tokens among those that are kept."""
        return self._stored.positions()

    @property
    def nbytes(self) -> int:
        """Return the bytes of keys and values, without those in the store."""
        return self._keys.nbytes + self._values.nbytes

    @property
    def length(self) -> int:
        return self._evicted + self._stored.length

    def restartable(self, length: int) -> int:
        """Return the most tokens, up to `length`, after which a prompt goes on as it does without cached tokens."""
        return length

    @property
    def held(self) -> int:
        return 0

    @property
    def _unsettled(self) -> int:
        """Return how many committed tokens have not been observed."""
        return self.length - self._settled

    @property
    def room(self) -> int:
        """Return how many tokens the next pass may have."""
        free = self.capacity - self._stored.length
        if free and self.observes:
            return min(free, self.every - self._unsettled or self.every)
        return free or self.every

    def begin(self, tokens: int, tree: Tree | None = None) -> None:
        assert tree is None, "a tree needs tokens that can be dropped"
        assert 0 < tokens <= self.room, f"{tokens} tokens at once where {self.room} are the most"
        if not self.length:
            self.forget()
        is_full = self._stored.length == self.capacity
        if is_full or (self.observes and self._unsettled == self.every):
            self._settle(is_full)
        self._stored.begin(tokens)

    def _settle(self, evicts: bool) -> None:
        """Observe the attention of the unsettled tokens, and evict."""
        length, stored, unsettled = self.length, self._stored.length, self._unsettled
        self._start_over()  # until done: an interrupt leaves an empty cache
        for layer in range(self.store.shape.layers) if self.observes else ():
            self.observe(layer, self._received(layer, stored, unsettled))
        if evicts:
            stored = self._evict()
        else:
            self._stored.begin(stored)  # its tokens are still there
            self._stored.commit()
        self._evicted, self._settled = length - stored, length

    def _received(self, layer: int, stored: int, tokens: int) -> Tensor:
        """Return the attention that the stored tokens have received from the last `tokens` of them, for `observe`."""
        received = torch.zeros((self.store.shape.kv_heads, self.capacity), device=self.store.device)
        queries, lse = self._queries[layer, :tokens], self._lse[layer, :tokens]
        self.store.observe(layer, queries, stored - tokens, lse, received)
        return received

    def _evict(self) -> int:
        """Keep `budget` of the tokens in the full store, at new positions; return how many they are."""
        shape, budget = self.store.shape, self.budget
        rows = self._rope.rows(0, budget)
        no_queries = self._keys.new_empty((budget, 0, shape.head_dim))
        heads = torch.arange(shape.kv_heads, device=self.store.device)
        self._stored.begin(budget)
        for layer in range(shape.layers):
            kept = (self.keep(layer).T * shape.kv_heads + heads).flatten()  # rows of [capacity * kv_heads, head_dim]
            for tensor in (self._keys, self._values):
                tensor[layer].flatten(0, 1)[: len(kept)] = tensor[layer].flatten(0, 1).index_select(0, kept)
            keys, values = self._keys[layer, :budget], self._values[layer, :budget]
            self.store.append(layer, 0, no_queries, keys, values, rows_of(shape, layer, rows))
        self._stored.commit()
        return budget

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if k is None:  # what other layers attend to is chosen by the layer that has it
            return self._stored.attend(layer, q, k, v)
        start = self._stored.length
        self._keys[layer, start : start + len(k)], self._values[layer, start : start + len(v)] = k, v
        if not self.observes:
            return self._stored.attend(layer, q, k, v)
        new = slice(self._unsettled, self._unsettled + len(q))
        q, start = self._stored.append(layer, q, k, v)
        self._queries[layer, new] = q
        return self.store.attend(layer, q, start, lse=self._lse[layer, new])

    def hold(self) -> None:
        raise NotImplementedError("a cache that evicts has no trees")

    def commit(self, keep: Sequence[int] | None = None) -> None:
        self._stored.commit(keep)

    def truncate(self, length: int) -> int:
        assert 0 <= length <= self.length, f"cannot truncate {self.length} committed tokens to {length}"
        if length < self._settled:
            self._start_over()
            return 0
        self._stored.truncate(length - self._evicted)
        return length

    def _start_over(self) -> None:
        self._stored.truncate(0)
        self._evicted = self._settled = 0
