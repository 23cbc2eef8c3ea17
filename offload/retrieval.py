"""The middle level's cache: a few percent of the full cache's KV, chosen by the newest query (TriForce, section 4.1).

Selection is in chunks, for each layer and KV head by itself. A chunk is scored by the newest committed query, averaged
over the heads that share the KV head, against the chunk's mean key; the sink and the most recent chunks are always in.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .cache import FullCache, attend_stored
from .rope import rotate


class Selector(Protocol):
    """Which chunks of the full cache to attend to."""

    def select(self, full: FullCache, chunks: int, slots: int) -> Tensor:
        """Choose `slots` of the first `chunks` chunks (more than `slots`): numbers `[layers * kv_heads, slots]`."""
        ...

    def truncate(self, length: int) -> None:
        """Tokens at `length` and later may have changed since the last selection."""
        ...


class RecencySelector:
    """The sink and the most recent chunks, StreamingLLM's choice: the paper's ablation."""

    def __init__(self, sink: int, chunk: int) -> None:
        self._sink = -(-sink // chunk)

    def select(self, full: FullCache, chunks: int, slots: int) -> Tensor:
        layers, kv_heads = full.stored()[0].shape[:2]
        sink = min(self._sink, slots - 1)
        chosen = torch.cat((torch.arange(sink), torch.arange(chunks - slots + sink, chunks)))
        return chosen.to(full.stored()[0].device).expand(layers * kv_heads, -1)

    def truncate(self, length: int) -> None:
        pass


class RetrievalSelector:
    """The chunks that the newest query points at. Mean keys are kept and only ever made for new chunks.

    Selecting takes O(context / chunk).
    """

    def __init__(self, sink: int, chunk: int) -> None:
        self._sink = -(-sink // chunk)
        self._chunk = chunk
        self._done = 0  # chunks whose mean key is there
        self._means: Tensor | None = None  # [layers, kv_heads, room, head_dim]

    def select(self, full: FullCache, chunks: int, slots: int) -> Tensor:
        self._add_means(full, chunks)
        scores = self._scores(full, chunks)  # [layers * kv_heads, chunks]
        recent = max(1, slots // 16)
        sink = min(self._sink, slots - recent)
        scores[:, :sink] = scores[:, chunks - recent :] = float("inf")
        return scores.topk(slots, dim=-1, sorted=False).indices

    def _scores(self, full: FullCache, chunks: int) -> Tensor:
        means = self._means[:, :, :chunks].flatten(0, 1)
        query = full.query()
        if query is None:  # nothing to ask with: prefer what is recent
            return torch.arange(chunks, dtype=torch.float32, device=means.device).repeat(len(means), 1)
        layers, _, head_dim = query.shape
        query = query.view(layers, self._means.shape[1], -1, head_dim).float().mean(2)  # a mean of scores, and cheaper
        return torch.bmm(means, query.to(means.dtype).flatten(0, 1).unsqueeze(-1)).squeeze(-1).float()

    def _add_means(self, full: FullCache, chunks: int) -> None:
        keys = full.stored()[0]
        if self._means is None:
            layers, kv_heads, _, head_dim = keys.shape
            room = full.capacity // self._chunk
            self._means = torch.empty((layers, kv_heads, room, head_dim), dtype=keys.dtype, device=keys.device)
        if chunks > self._done:
            new = keys[:, :, self._done * self._chunk : chunks * self._chunk].unflatten(2, (-1, self._chunk))
            for target, layer in zip(self._means[:, :, self._done : chunks], new, strict=True):
                target.copy_(layer.mean(2, dtype=torch.float32))
            self._done = chunks

    def truncate(self, length: int) -> None:
        self._done = min(self._done, length // self._chunk)


class Refresh:
    """When to select again: every so many tokens, or when acceptance has fallen since the last time."""

    def __init__(self, every: int | None, fall: float = 0.9, least: int = 8) -> None:
        self._every = every
        self._fall = fall
        self._least = least  # tokens between two selections, and what the reference is measured over
        self.start(0)

    def start(self, length: int) -> None:
        """A selection was made with so many tokens in the context."""
        self._since = length
        self._moving: float | None = None
        self._best = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        """So many of the middle level's tokens were drafted and accepted."""
        if drafted:
            rate = accepted / drafted
            weight = min(1.0, drafted / 16)
            self._moving = rate if self._moving is None else self._moving + weight * (rate - self._moving)
            self._best = max(self._best, self._moving)

    def due(self, length: int) -> bool:
        """Whether to select again at this length."""
        grown = length - self._since
        if self._every is not None:
            return grown >= self._every
        return grown >= self._least and self._moving is not None and self._moving < self._fall * max(self._best, 0.5)


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
        self._chunk, self._slots = chunk, budget // chunk
        self._tail, self._room = tail, tail + chunk
        keys = full.stored()[0]
        layers, kv_heads, _, head_dim = keys.shape
        size = (layers, kv_heads, self._slots * chunk + self._room, head_dim)
        self._keys, self._values = (torch.empty(size, dtype=keys.dtype, device=keys.device) for _ in range(2))
        self._chosen = torch.empty((layers * kv_heads, 0), dtype=torch.long, device=keys.device)
        self._start = 0  # of the tail: where the chunks end, in tokens of the context
        self._length = self._exact = self._inflight = 0
        self._rebuild = True
        self.copied_chunks = 0  # so far, of all layers and heads
        full.keep_queries()

    @property
    def length(self) -> int:
        return self._length

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
        self._chosen[self._chosen >= unchanged // self._chunk] = -1  # in a slot, but no longer that chunk
        if full < self._start or unchanged < self._start:
            self._rebuild = True
        self._length = max(self._length, full)

    def begin(self, tokens: int) -> None:
        full = min(self._full.length, self._length)
        if self._length <= self._full.length and (self._rebuild or self._due(tokens)):
            self._select(full)
        at = slice(max(self._exact, self._start), full)
        if at.start < at.stop:
            for ours, theirs in zip((self._keys, self._values), self._full.stored(), strict=True):
                ours[:, :, self._place(at.start) : self._place(at.stop)] = theirs[:, :, at]
            self._exact = full
        assert not self._rebuild and self._length + tokens - self._start <= self._room, "a draft longer than the tail"
        self._inflight = tokens
        self._rows = self._full.rope.rows(self._length, self._length + tokens)

    def _due(self, tokens: int) -> bool:
        crowded = self._length + tokens - self._start > self._chunk + self._tail // 2
        return crowded or self._refresh.due(self._length)

    def _place(self, token: int) -> int:
        """Where in the buffer a token of the tail stands."""
        return self._chosen.shape[1] * self._chunk + token - self._start

    def _select(self, length: int) -> None:
        chunks = max(length - 1, 0) // self._chunk  # the newest token stays in the tail
        slots = min(self._slots, chunks)
        if chunks > slots:
            wanted = self._selector.select(self._full, chunks, slots)
        else:
            wanted = torch.arange(chunks, device=self._chosen.device).expand(len(self._chosen), -1)
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
        for ours, theirs in zip((self._keys, self._values), self._full.stored(), strict=True):
            slots = ours[:, :, : self._chosen.shape[1] * self._chunk].unflatten(2, (-1, self._chunk)).flatten(0, 1)
            source = theirs[:, :, : chunks * self._chunk].unflatten(2, (-1, self._chunk)).flatten(0, 1)
            slots[row, slot] = source[row, chunk]
        self._chosen = self._chosen.clone()
        self._chosen[row, slot] = chunk
        self.copied_chunks += len(row)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start, end = self._place(self._length), self._place(self._length) + self._inflight
        keys, values = self._keys[layer], self._values[layer]
        keys[:, start:end] = rotate(k, self._rows).transpose(0, 1)
        values[:, start:end] = v.transpose(0, 1)
        return attend_stored(rotate(q, self._rows), keys[:, :end], values[:, :end])

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
