"""Selection of the full cache's chunks for the retrieval cache, and when to repeat it (TriForce, section 4.1).

A chunk is a few neighbouring tokens. Each layer and KV head has its own selection. A chunk's score is the product
of the newest committed query, averaged over the heads that share the KV head, and the chunk's mean key. The sink and
the most recent chunks are always selected.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .full import FullCache


class Selector(Protocol):
    """A policy that selects chunks of the full cache."""

    def select(self, full: FullCache, chunks: int, slots: int) -> Tensor:
        """Return `slots` of the first `chunks` chunk numbers (more than `slots`), `[layers * kv_heads, slots]`."""
        ...

    def missing(self, chunks: int) -> float:
        """Return the share of the first `chunks` chunks whose mean keys `select` would have to compute."""
        ...

    def truncate(self, length: int) -> None:
        """Note that tokens at position `length` and later may have changed since the last selection."""
        ...


def choose(selector: Selector, full: FullCache, chunks: int, slots: int) -> Tensor:
    """Return `slots` of the first `chunks` chunks, or all if there are no more: `[layers * kv_heads, slots]`."""
    if chunks > slots:
        return selector.select(full, chunks, slots)
    shape = full.store.shape
    return torch.arange(chunks, device=full.store.device).expand(shape.layers * shape.kv_heads, -1)


class RecencySelector:
    """Selects the sink and the most recent chunks, as StreamingLLM does: the paper's ablation."""

    def __init__(self, sink: int, chunk: int) -> None:
        self._sink = -(-sink // chunk)

    def select(self, full: FullCache, chunks: int, slots: int) -> Tensor:
        shape = full.store.shape
        sink = min(self._sink, slots - 1)
        chosen = torch.cat((torch.arange(sink), torch.arange(chunks - slots + sink, chunks)))
        return chosen.to(full.store.device).expand(shape.layers * shape.kv_heads, -1)

    def missing(self, chunks: int) -> float:
        return 0.0

    def truncate(self, length: int) -> None:
        pass


class RetrievalSelector:
    """Selects the chunks whose mean keys score highest with the newest query.

    Mean keys are kept, and computed only for new chunks. A selection takes O(context / chunk) time.
    """

    def __init__(self, sink: int, chunk: int) -> None:
        self._sink = -(-sink // chunk)
        self._chunk = chunk
        self._done = 0  # chunks whose mean keys are computed
        self._means: Tensor | None = None  # [layers, kv_heads, chunks of the capacity, head_dim]

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
        if query is None:  # no query was kept: prefer recent chunks
            return torch.arange(chunks, dtype=torch.float32, device=means.device).repeat(len(means), 1)
        layers, _, head_dim = query.shape
        query = (
            query.view(layers, self._means.shape[1], -1, head_dim).float().mean(2)
        )  # equals the mean of the scores, and is cheaper
        return torch.bmm(means, query.to(means.dtype).flatten(0, 1).unsqueeze(-1)).squeeze(-1).float()

    def _add_means(self, full: FullCache, chunks: int) -> None:
        store = full.store
        if self._means is None:
            shape, room = store.shape, full.capacity // self._chunk
            size = (shape.layers, shape.kv_heads, room, shape.head_dim)
            self._means = torch.empty(size, dtype=store.dtype, device=store.device)
        if chunks > self._done:
            start, end = self._done * self._chunk, chunks * self._chunk
            for layer, means in enumerate(self._means):
                means[:, self._done : chunks] = store.mean_keys(layer, start, end, self._chunk)
            self._done = chunks

    def missing(self, chunks: int) -> float:
        return 1 - min(self._done / max(chunks, 1), 1)

    def truncate(self, length: int) -> None:
        self._done = min(self._done, length // self._chunk)


class Refresh:
    """When to select again: every `every` tokens, or if None when acceptance has fallen since the last selection."""

    def __init__(self, every: int | None, fall: float = 0.9, least: int = 8) -> None:
        self._every = every
        self._fall = fall
        self._least = least  # fewest tokens between two selections
        self.start(0)

    def start(self, length: int) -> None:
        """Note that a selection was made when the sequence had `length` tokens."""
        self._since = length
        self._moving: float | None = None
        self._best = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        """Note how many tokens were drafted with the selection, and how many of them were accepted."""
        if drafted:
            rate = accepted / drafted
            weight = min(1.0, drafted / 16)
            self._moving = rate if self._moving is None else self._moving + weight * (rate - self._moving)
            self._best = max(self._best, self._moving)

    def due(self, length: int) -> bool:
        """Return whether to select again at this length of the sequence."""
        grown = length - self._since
        if self._every is not None:
            return grown >= self._every
        return grown >= self._least and self._moving is not None and self._moving < self._fall * max(self._best, 0.5)
