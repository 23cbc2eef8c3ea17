"""Which chunks of the full cache the middle level attends to, and when to choose anew (TriForce, section 4.1).

A chunk is a few neighbouring tokens. Each layer and KV head has a choice of its own. A chunk is scored by the newest
committed query, averaged over the heads that share the KV head, against the chunk's mean key; the sink and the most
recent chunks are always in.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .full import FullCache


class Selector(Protocol):
    """Which chunks of the full cache to attend to."""

    def select(self, full: FullCache, chunks: int, slots: int) -> Tensor:
        """Choose `slots` of the first `chunks` chunks (more than `slots`): numbers `[layers * kv_heads, slots]`."""
        ...

    def truncate(self, length: int) -> None:
        """Tokens at `length` and later may have changed since the last selection."""
        ...


def choose(selector: Selector, full: FullCache, chunks: int, slots: int) -> Tensor:
    """`slots` of the first `chunks` chunks, all of them where there are no more: `[layers * kv_heads, slots]`."""
    if chunks > slots:
        return selector.select(full, chunks, slots)
    shape = full.store.shape
    return torch.arange(chunks, device=full.store.device).expand(shape.layers * shape.kv_heads, -1)


class RecencySelector:
    """The sink and the most recent chunks, StreamingLLM's choice: the paper's ablation."""

    def __init__(self, sink: int, chunk: int) -> None:
        self._sink = -(-sink // chunk)

    def select(self, full: FullCache, chunks: int, slots: int) -> Tensor:
        shape = full.store.shape
        sink = min(self._sink, slots - 1)
        chosen = torch.cat((torch.arange(sink), torch.arange(chunks - slots + sink, chunks)))
        return chosen.to(full.store.device).expand(shape.layers * shape.kv_heads, -1)

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
