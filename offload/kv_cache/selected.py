"""The middle level's cache: a few percent of the full cache's KV. Where that lies is a subclass's business."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from .full import FullCache
from .selection import Refresh, Selector, choose


class SelectedCache(ABC):
    """A KVCache of selected chunks of a full cache and, behind them, the newest tokens without a gap (the tail).

    Its own keys and values are only those of tokens that the full cache has not run yet; `adopt` takes over those that
    it has. The chunks are selected again when the selection is out of date (`Refresh`) or the tail is crowded.
    """

    def __init__(
        self, full: FullCache, selector: Selector, refresh: Refresh, budget: int, chunk: int, tail: int
    ) -> None:
        """`budget` tokens in chunks of `chunk`; room for `tail` tokens beside, twice the longest draft."""
        self._full, self._selector, self._refresh = full, selector, refresh
        self._chunk, self._slots = chunk, min(budget, full.capacity) // chunk
        self._tail, self._room = tail, tail + chunk
        self._start = 0  # position in the sequence where the chunks end and the tail begins
        self._length = self._inflight = 0
        self._rebuild = True
        full.keep_queries()

    @property
    def length(self) -> int:
        return self._length

    def observe(self, drafted: int, accepted: int) -> None:
        """Note how many of the tokens drafted with this cache the full cache accepted."""
        self._refresh.observe(drafted, accepted)

    def renew(self) -> None:
        """Select again at the next pass."""
        self._rebuild = True

    def adopt(self) -> None:
        """Take over the full cache's tokens, which must all be in the sequence; keep those that only this one has run.

        They are dropped where they cannot be kept: overwritten, or under a selection that has to be made again.
        """
        full = self._full.length
        unchanged = self._full.marks.update(self, full)
        self._selector.truncate(unchanged)
        if unchanged < self._start:
            self._rebuild = True
        intact = self._invalidate(unchanged)
        self._length = max(self._length, full) if intact and not self._rebuild else full

    @abstractmethod
    def _invalidate(self, unchanged: int) -> bool:
        """Forget what was taken from tokens of the full cache at position `unchanged` or later.

        Returns whether the keys and values that only this cache has are still there.
        """

    def begin(self, tokens: int) -> None:
        end = self._length + tokens
        if self._length <= self._full.length and (self._rebuild or self._is_due(end)):
            self._select()
        assert not self._rebuild and end - self._start <= self._room, "a draft longer than the tail"
        self._inflight = tokens
        self.rows = self._full.rope.rows(self._length, end)

    def _is_due(self, end: int) -> bool:
        crowded = end - self._start > self._chunk + self._tail // 2
        return crowded or self._refresh.due(self._length)

    def _select(self) -> None:
        self._rebuild = True  # until it is done: an interrupt must not leave an old selection under new lengths
        chunks = max(self._length - 1, 0) // self._chunk  # the newest token stays in the tail
        self._take(choose(self._selector, self._full, chunks, min(self._slots, chunks)), chunks)
        self._start = chunks * self._chunk
        self._rebuild = False
        self._refresh.start(self._length)

    @abstractmethod
    def _take(self, chosen: Tensor, chunks: int) -> None:
        """Attend from now on to the `chosen` `[layers * kv_heads, slots]` of the first `chunks` chunks."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As in `KVCache`."""

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
