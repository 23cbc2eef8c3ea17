"""Selection of the full cache's chunks for the retrieval cache, and when to repeat it (TriForce, section 4.1).

A chunk is a few neighbouring tokens. Each layer and KV head has its own selection. A chunk's score is the product
of the newest committed query, averaged over the heads that share the KV head, and the chunk's mean key. The sink and
the most recent chunks are always selected.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .chunk_scores import KeptMeanKeys, chunk_scores
from .full import FullCache


class Selector(Protocol):
    """A policy that selects chunks of the full cache."""

    cost: float  # estimated time of a selection whose mean keys are known, relative to attention in a plain step

    def select(self, full: FullCache, chunks: int, slots: int) -> Tensor:
        """Return `slots` of the first `chunks` chunk numbers (more than `slots`), `[layers * kv_heads, slots]`."""

    def missing(self, chunks: int) -> float:
        """Return the share of the first `chunks` chunks whose mean keys `select` would have to compute."""

    def truncate(self, length: int) -> None:
        """Note that tokens at position `length` and later may have changed since the last selection."""


def choose(selector: Selector, full: FullCache, chunks: int, slots: int) -> Tensor:
    """Return `slots` of the first `chunks` chunks, or all if there are no more: `[layers * kv_heads, slots]`."""
    if chunks > slots:
        return selector.select(full, chunks, slots)
    shape = full.store.shape
    return torch.arange(chunks, device=full.store.device).expand(shape.layers * shape.kv_heads, -1)


def largest(scores: Tensor, count: int) -> Tensor:
    """Return the columns of the `count` largest of each row `[rows, columns]`, in no order: `[rows, count]`."""
    if scores.device.type != "cpu" or count == scores.shape[1]:
        return scores.topk(count, dim=-1, sorted=False).indices
    first = scores.shape[1] - count
    return torch.from_numpy(np.argpartition(scores.numpy(), first, axis=1)[:, first:])  # half of topk's time


class RecencySelector:
    """Selects the sink and the most recent chunks, as StreamingLLM does: the paper's ablation."""

    cost = 0.0

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


_RECENT = 16  # of the slots, one in so many is for the most recent chunks


class RetrievalSelector:
    """Selects the chunks that score highest with the newest query, in O(context / chunk) time on a CPU."""

    cost = 1.0

    def __init__(self, sink: int, chunk: int) -> None:
        self._sink = -(-sink // chunk)
        self._chunk = chunk
        self._scores: KeptMeanKeys | None = None

    def select(self, full: FullCache, chunks: int, slots: int) -> Tensor:
        recent = max(1, slots // _RECENT)
        sink = min(self._sink, slots - recent)
        chosen = []
        for scores in self._batches(full, chunks):
            scores[:, :sink] = scores[:, chunks - recent :] = float("inf")
            chosen.append(largest(scores, slots))
        return torch.cat(chosen)

    def _batches(self, full: FullCache, chunks: int) -> Iterator[Tensor]:
        """Yield scores `[rows, chunks]`: all layers' rows in order."""
        query, shape, device = full.query(), full.store.shape, full.store.device
        if query is None:  # no query was kept: prefer recent chunks
            recency = torch.arange(chunks, dtype=torch.float32, device=device)
            return iter([recency.repeat(shape.layers * shape.kv_heads, 1)])
        if self._scores is None:
            self._scores = chunk_scores(full.store, self._chunk, full.capacity // self._chunk)
        # The product with the mean query equals the mean of the products, and is cheaper.
        grouped = query.unflatten(1, (shape.kv_heads, -1)).float().mean(2)
        return self._scores.scores(grouped, chunks)

    def missing(self, chunks: int) -> float:
        return 1.0 if self._scores is None else 1 - min(self._scores.kept / max(chunks, 1), 1)

    def truncate(self, length: int) -> None:
        if self._scores is not None:
            self._scores.truncate(length // self._chunk)


_FALL = 0.9  # of the best acceptance since a selection: below, there is another one
_LEAST = 8  # tokens between two selections


class Refresh:
    """When to select again: every `every` tokens, or if None when acceptance has fallen since the last selection."""

    def __init__(self, every: int | None) -> None:
        self._every = every
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
        return grown >= _LEAST and self._moving is not None and self._moving < _FALL * max(self._best, 0.5)
