"""The base of caches that a target runs on instead of its full cache: they evict tokens, and change the answer.

Such a cache is a file with a subclass, which chooses the tokens that stay, and a row in settings/methods.py. The tokens
are numbered from 0, as in StreamingLLM (arXiv 2309.17453, section 3.2), so that no position exceeds the cache and a
sequence may go on for ever.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..architecture.rope import rows_of
from ..memory.store import DeviceStore
from ..memory.tree_attention import Tree
from ..settings.config import Speculation
from .full import FullCache


class EvictingCache(ABC):
    """A KVCache that evicts down to `budget` tokens whenever its store is full, at the same positions of any sequence.

    It has no trees. No layer has a window of the model's own, or linear attention.

    In between, tokens are appended to a FullCache over the store, so that any kernel attends to them. What is evicted
    does not depend on how the sequence was divided into passes. Keys before RoPE and values are kept as well: an
    eviction numbers the tokens that stay anew, for each layer and KV head, and stores them again.

    A subclass may call `evict` where a prompt ends, and so keep all of a prompt until then. A rollback that an eviction
    has made impossible starts over.
    """

    held = 0
    is_intact = True
    has_static_steps = False
    is_dumpable = False  # whether a prompt's keys and values can be saved and restored
    windows = states = None
    observes = False  # whether `observe` is to be called with the attention that tokens have received

    def __init__(self, full: FullCache, settings: Speculation, every: int | None = None) -> None:
        """Make an empty cache in the store of a full one, a `DeviceStore`.

        `every`: new tokens whose attention is observed at once; None for those between two evictions.
        """
        store, self.budget = full.store, settings.kept_tokens
        assert isinstance(store, DeviceStore), "keys and values as they are"
        self._full, self.store, self.rope, self.marks = full, store, full.rope, full.marks
        self.device, self.capacity = full.device, full.capacity
        self.every = every or self.capacity - self.budget
        assert self.every > 0, "an eviction makes room"
        self._evicted = 0  # tokens
        self._ended_prompt = False  # whether tokens were evicted at the end of a prompt: others would be if it went on
        self._is_settling = False  # after an interrupt then, nothing counts as cached
        self._settled = 0  # tokens of the sequence whose attention was observed or that were evicted: no way back
        shape = store.shape
        size = (shape.layers, self.capacity, shape.kv_heads, shape.head_dim)
        self._keys, self._values = (torch.empty(size, dtype=store.dtype, device=store.device) for _ in range(2))
        if self.observes:  # of the tokens that are not settled, with the log-sum-exp of their attention
            rows = (shape.layers, self.every, shape.heads)
            self._queries = torch.empty((*rows, shape.head_dim), dtype=store.dtype, device=store.device)
            self._lse = torch.empty(rows, device=store.device)

    @abstractmethod
    def keep(self, layer: int, stored: int) -> Tensor:
        """Return which of the stored tokens stay: increasing indices `[kv_heads, budget]`.

        They get the indices 0 to `budget` - 1; a subclass moves what it knows of them accordingly.
        """

    def observe(self, layer: int, received: Tensor) -> None:
        """Observe the attention of new tokens: what each stored one has received, `[kv_heads, capacity]` in fp32.

        That is the sum of the softmax weights of all new queries of its KV head; 0 behind the last token.
        """
        return

    def forget(self) -> None:
        """Forget everything observed: another sequence begins."""
        return

    def end_prompt(self) -> None:
        """Note that a prompt has been read; what follows is the answer."""
        return

    def evict(self) -> None:
        """Evict down to the budget at the end of a prompt; do nothing if no more tokens are stored."""
        if self._full.length > self.budget:
            self._settle(evicts=True)
            self._ended_prompt = True

    @property
    def nbytes(self) -> int:
        """Return the bytes of keys and values, without those in the store."""
        return self._keys.nbytes + self._values.nbytes

    @property
    def length(self) -> int:
        return 0 if self._is_settling else self._evicted + self._full.length

    def positions(self) -> Tensor:
        """Return the positions of the pass's tokens in the full cache."""
        return self._full.positions()

    def restartable(self, length: int) -> int:
        """Return the most tokens, up to `length`, after which a prompt goes on as it does without cached tokens."""
        if self._ended_prompt or length < self._settled:
            return 0
        return self._evicted + self._full.restartable(length - self._evicted)

    @property
    def _unsettled(self) -> int:
        """Return how many committed tokens have not been observed."""
        return self.length - self._settled

    @property
    def room(self) -> int:
        """Return how many tokens the next pass may have; after an interrupted eviction, those of an empty cache."""
        stored, unsettled = (0, 0) if self._is_settling else (self._full.length, self._unsettled)
        free = self.capacity - stored
        if free and self.observes:
            return min(free, self.every - unsettled or self.every)
        return free or self.every

    def begin(self, tokens: int, tree: Tree | None = None) -> None:
        if self._is_settling:  # an eviction was interrupted: what is stored are tokens of two positions
            self._start_over()
        assert tree is None, "an approximate cache has no trees"
        assert 0 < tokens <= self.room, f"{tokens} tokens at once where {self.room} are the most"
        if not self.length:
            self.forget()
        is_full = self._full.length == self.capacity
        if is_full or (self.observes and self._unsettled == self.every):
            self._settle(is_full)
        self._full.begin(tokens)

    def _settle(self, evicts: bool) -> None:
        """Observe the attention of the unsettled tokens, and evict."""
        length, stored, unsettled = self.length, self._full.length, self._unsettled
        self._is_settling = True  # until done: an interrupt leaves an empty cache
        for layer in range(self.store.shape.layers) if self.observes else ():
            self.observe(layer, self._received(layer, stored, unsettled))
        if evicts:
            stored = self._evict(stored)
        self._evicted, self._settled = length - stored, length
        self._is_settling = False

    def _received(self, layer: int, stored: int, tokens: int) -> Tensor:
        """Return the attention that the stored tokens have received from the last `tokens` of them, for `observe`."""
        received = torch.zeros((self.store.shape.kv_heads, self.capacity), device=self.store.device)
        queries, lse = self._queries[layer, :tokens], self._lse[layer, :tokens]
        self.store.observe(layer, queries, stored - tokens, lse, received)
        return received

    def _evict(self, stored: int) -> int:
        """Keep `budget` of the stored tokens, at new positions; return how many they are."""
        shape, budget = self.store.shape, self.budget
        cos, sin = self.rope.rows(0, budget)
        no_queries = self._keys.new_empty((budget, 0, shape.head_dim))
        heads = torch.arange(shape.kv_heads, device=self.store.device)
        self._full.truncate(0)
        self._full.begin(budget)
        for layer in range(shape.layers):
            # Rows of [capacity * kv_heads, head_dim].
            kept = (self.keep(layer, stored).T * shape.kv_heads + heads).flatten()
            for tensor in (self._keys, self._values):
                tensor[layer].flatten(0, 1)[: len(kept)] = tensor[layer].flatten(0, 1).index_select(0, kept)
            new = no_queries, self._keys[layer, :budget], self._values[layer, :budget]
            self.store.append(layer, 0, *new, rows_of(shape, layer, (cos, sin)))
        self._full.commit()
        return budget

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if k is None or v is None:  # what other layers attend to is chosen by the layer that has it
            return self._full.attend(layer, q, k, v)
        start = self._full.length
        self._keys[layer, start : start + len(k)], self._values[layer, start : start + len(v)] = k, v
        if not self.observes:
            return self._full.attend(layer, q, k, v)
        new = slice(self._unsettled, self._unsettled + len(q))
        q, start = self._full.append(layer, q, k, v)
        self._queries[layer, new] = q
        return self.store.attend(layer, q, start, lse=self._lse[layer, new])

    def hold(self) -> None:
        raise NotImplementedError("an approximate cache has no trees")

    def commit(self, keep: Sequence[int] | None = None) -> None:
        self._full.commit(keep)

    def truncate(self, length: int) -> int:
        assert 0 <= length <= self.length, f"cannot truncate {self.length} committed tokens to {length}"
        if length < self._settled or self._is_settling:
            self._start_over()
            return 0
        return self._evicted + self._full.truncate(length - self._evicted)

    def _start_over(self) -> None:
        self._full.truncate(0)
        self._evicted = self._settled = 0
        self._ended_prompt = self._is_settling = False


class SinkCache(EvictingCache):
    """StreamingLLM for a target: keeps the first `sink` tokens and the latest ones, as many as the budget leaves.

    A draft model's is streaming_llm.py: its window ends with each pass, and small rollbacks are always possible.
    """

    def __init__(self, full: FullCache, settings: Speculation) -> None:
        super().__init__(full, settings)
        latest = torch.arange(self.capacity - self.budget + settings.sink, self.capacity)
        kept = torch.cat((torch.arange(settings.sink), latest)).to(self.device)
        self._kept = kept.expand(full.store.shape.kv_heads, -1)

    def keep(self, layer: int, stored: int) -> Tensor:
        return self._kept
