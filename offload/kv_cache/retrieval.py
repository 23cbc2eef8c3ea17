"""The middle level's cache: a few percent of the full cache's KV, copied to where it is quick to attend to."""

from __future__ import annotations

import torch
from torch import Tensor

from .full import FullCache
from .selection import Refresh, Selector, choose


class SelectedCache:
    """Selected chunks of a full cache, copied, and behind them the newest tokens, without a gap.

    It has keys and values of its own only for tokens that the full cache has not run yet; `adopt` takes over those that
    it has. Order does not matter to attention once keys are rotated, so a chunk stays in its slot as long as it is
    selected, and a new selection copies only the chunks that are new to it.
    """

    def __init__(
        self, full: FullCache, selector: Selector, refresh: Refresh, budget: int, chunk: int, tail: int
    ) -> None:
        """`budget` tokens in chunks of `chunk`; room for `tail` tokens beside, twice the longest draft."""
        self._full, self._selector, self._refresh = full, selector, refresh
        self._chunk, self._slots = chunk, min(budget, full.capacity) // chunk
        self._tail, self._room = tail, tail + chunk
        store, shape = full.store, full.store.shape
        self.store = store.near(self._slots * chunk + self._room)
        assert chunk % self.store.grain == 0, "a slot is made of whole grains"
        self._chosen = torch.empty((shape.layers * shape.kv_heads, 0), dtype=torch.long, device=store.device)
        self._start = 0  # of the tail: where the chunks end, in tokens of the context
        self._length = self._exact = self._inflight = 0
        self._rebuild = True
        self.copied_chunks = 0  # so far, of all layers and heads
        full.keep_queries()

    @property
    def length(self) -> int:
        return self._length

    @property
    def place(self) -> int:
        """Where in `store` the first in-flight token stands; `rows` are the rotations of all of them."""
        return self._place(self._length)

    def observe(self, drafted: int, accepted: int) -> None:
        """So many tokens drafted with this cache were accepted by the full cache."""
        self._refresh.observe(drafted, accepted)

    def renew(self) -> None:
        """Select again at the next pass; what is selected again is not copied again."""
        self._rebuild = True

    def adopt(self) -> None:
        """Take over what the full cache has, all of it in the context; what it has not run yet stays ours."""
        full = self._full.length
        unchanged = self._full.marks.look(self, full)
        self._exact = min(self._exact, unchanged)
        self._selector.truncate(unchanged)
        if unchanged < self._start:
            self._rebuild = True
            self._chosen[self._chosen >= unchanged // self._chunk] = -1  # in a slot, but no longer that chunk
        # A new selection cannot be made under tokens that only we have run: they are run again.
        self._length = full if self._rebuild else max(self._length, full)

    def begin(self, tokens: int) -> None:
        full = min(self._full.length, self._length)
        if self._length <= self._full.length and (self._rebuild or self._due(tokens)):
            self._select(full)
        at = slice(max(self._exact, self._start), full)
        if at.start < at.stop:
            self.store.write(self._place(at.start), *self._full.store.read(at.start, at.stop))
            self._exact = full
        assert not self._rebuild and self._length + tokens - self._start <= self._room, "a draft longer than the tail"
        self._inflight = tokens
        self.rows = self._full.rope.rows(self._length, self._length + tokens)

    def _due(self, tokens: int) -> bool:
        crowded = self._length + tokens - self._start > self._chunk + self._tail // 2
        return crowded or self._refresh.due(self._length)

    def _place(self, token: int) -> int:
        """Where in the buffer a token of the tail stands."""
        return self._chosen.shape[1] * self._chunk + token - self._start

    def _select(self, length: int) -> None:
        chunks = max(length - 1, 0) // self._chunk  # the newest token stays in the tail
        slots = min(self._slots, chunks)
        wanted = choose(self._selector, self._full, chunks, slots)
        if slots != self._chosen.shape[1]:
            extra = slots - self._chosen.shape[1]
            self._chosen = torch.nn.functional.pad(self._chosen, (0, max(extra, 0)), value=-1)[:, :slots]
        self._replace(wanted, chunks)
        self._start = self._exact = chunks * self._chunk
        self._rebuild = False
        self._refresh.start(length)

    def _replace(self, wanted: Tensor, chunks: int) -> None:
        """Put the wanted chunks into the slots of those that are not wanted any more; each row has as many of both."""
        is_wanted, is_there = (
            torch.zeros((len(wanted), chunks + 1), dtype=torch.bool, device=wanted.device) for _ in range(2)
        )
        is_wanted.scatter_(1, wanted, True)
        is_wanted[:, chunks] = False
        empty = (self._chosen < 0) | (self._chosen >= chunks)
        there = self._chosen.masked_fill(empty, chunks)  # the last column stands for an empty slot
        is_there.scatter_(1, there, True)
        row, slot = (~is_wanted.gather(1, there)).nonzero(as_tuple=True)
        same_row, place = (~is_there.gather(1, wanted)).nonzero(as_tuple=True)
        assert torch.equal(row, same_row), "a row has lost or doubled a chunk"
        chunk = wanted[row, place]
        self._chosen = self._chosen.clone()
        self._chosen[row, slot] = -1  # an interrupt must not leave a slot under a wrong name
        self.store.put(row, slot, self._chunk, *self._full.store.gather(row, chunk, self._chunk))
        self._chosen[row, slot] = chunk
        self.copied_chunks += len(row)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = self.place
        return self.store.attend(layer, self.store.append(layer, place, q, k, v, self.rows), place)

    def commit(self) -> None:
        self._length += self._inflight
        self._inflight = 0

    def truncate(self, length: int) -> int:
        assert 0 <= length <= self._length, f"cannot truncate {self._length} committed tokens to {length}"
        self._inflight = 0
        self._length = length
        self._exact = min(self._exact, length)
        if length < self._start:
            self._rebuild = True
        return length
