"""The middle level's cache on a CPU: a list of the full cache's blocks, attended to where they lie, without a copy."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.native.library import BLOCK
from .block_store import BlockStore
from .full import FullCache
from .selection import Refresh, Selector, choose


class TableCache:
    """Selected chunks of a full cache, and behind them the newest tokens, without a gap.

    Tokens that the full cache has not run yet stand in the room behind its own, where it writes when it does run them:
    what was there is then lost, and `adopt` forgets it.
    """

    def __init__(
        self, full: FullCache, selector: Selector, refresh: Refresh, budget: int, chunk: int, tail: int
    ) -> None:
        """`budget` tokens in chunks of `chunk`, whole blocks; room for `tail` tokens beside, twice the longest draft.

        The full cache's store must be a BlockStore.
        """
        assert chunk % BLOCK == 0, "chunks are whole blocks"
        self._full, self._selector, self._refresh = full, selector, refresh
        self._store: BlockStore = full.store
        self._chunk, self._slots = chunk, min(budget, full.capacity) // chunk
        self._tail, self._room = tail, tail + chunk
        self._table = torch.empty(0, dtype=torch.int32)  # [layers, kv_heads, blocks]
        self._start = 0  # where the chunks end and the tail begins, in tokens of the context
        self._selected = 0  # tokens in the chosen chunks
        self._length = self._inflight = 0
        self._writes = -1  # the full cache's count when our own tokens were known to be there
        self._rebuild = True
        full.keep_queries()

    @property
    def length(self) -> int:
        return self._length

    def observe(self, drafted: int, accepted: int) -> None:
        """So many tokens drafted with this cache were accepted by the full cache."""
        self._refresh.observe(drafted, accepted)

    def renew(self) -> None:
        """Select again at the next pass."""
        self._rebuild = True

    def adopt(self) -> None:
        """Take over what the full cache has, all of it in the context; what only we have run stays if it is there."""
        full = self._full.length
        unchanged = self._full.marks.look(self, full)
        self._selector.truncate(unchanged)
        if unchanged < self._start:
            self._rebuild = True
        overwritten = self._writes != self._full.writes
        self._writes = self._full.writes
        # A new selection cannot be made under tokens that only we have run: they are run again.
        self._length = full if self._rebuild or overwritten else max(self._length, full)

    def begin(self, tokens: int) -> None:
        end = self._length + tokens
        if self._length <= self._full.length and (self._rebuild or self._due(end)):
            self._select(self._length)
        assert not self._rebuild and end - self._start <= self._room, "a draft longer than the tail"
        assert end <= self._full.capacity, f"{end} tokens in a cache of {self._full.capacity}"
        self._inflight = tokens
        self._writes = self._full.writes = self._full.writes + 1  # another such cache's tokens are lost, not ours
        self._rows = self._full.rope.rows(self._length, end)

    def _due(self, end: int) -> bool:
        crowded = end - self._start > self._chunk + self._tail // 2
        return crowded or self._refresh.due(self._length)

    def _select(self, length: int) -> None:
        self._rebuild = True  # until it is done: an interrupt must not leave an old table under new lengths
        chunks = max(length - 1, 0) // self._chunk  # the newest token stays in the tail
        chosen = choose(self._selector, self._full, chunks, min(self._slots, chunks))
        blocks = chosen.sort(dim=-1).values.unsqueeze(-1) * (self._chunk // BLOCK) + torch.arange(self._chunk // BLOCK)
        self._start = chunks * self._chunk
        self._selected = chosen.shape[1] * self._chunk
        tail = torch.arange(self._start // BLOCK, -(-(self._start + self._room) // BLOCK)).expand(len(chosen), -1)
        shape = self._store.shape
        table = torch.cat((blocks.flatten(1), tail), dim=1).view(shape.layers, shape.kv_heads, -1)
        self._table = table.to(torch.int32).contiguous()
        self._rebuild = False
        self._refresh.start(length)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # What the full cache holds is not overwritten with our approximation of it.
        stored = min(max(self._full.length - self._length, 0), self._inflight)
        q = self._store.append(layer, self._length, q, k, v, self._rows, stored)
        seen = self._selected + self._length - self._start + 1
        return self._store.attend_table(layer, q, self._table[layer], seen)

    def commit(self) -> None:
        self._length += self._inflight
        self._inflight = 0

    def truncate(self, length: int) -> int:
        assert 0 <= length <= self._length, f"cannot truncate {self._length} committed tokens to {length}"
        self._inflight = 0
        self._length = length
        if length < self._start:
            self._rebuild = True
        return length
