"""A slow reference of caches that evict: lists of tokens, one token at a time, in fp64."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload.architecture.rope import rotate
from offload.model.decoder import Model

Keep = Callable[[torch.Tensor, int], list[int]]  # scores of the stored tokens, and the budget -> indices that stay


def keep_heavy(sink: int, window: int) -> Keep:
    """H2O: the sink, the window, and the highest scores of the others."""

    def keep(scores: torch.Tensor, budget: int) -> list[int]:
        others = range(sink, len(scores) - window)
        heavy = sorted(others, key=lambda token: -scores[token])[: budget - sink - window]
        return sorted([*range(sink), *heavy, *range(len(scores) - window, len(scores))])

    return keep


def keep_latest(sink: int) -> Keep:
    """StreamingLLM: the sink and the latest tokens."""
    return lambda scores, budget: [*range(sink), *range(len(scores) - budget + sink, len(scores))]


class SlowCache:
    """Keeps every head's tokens before RoPE with their scores, and numbers them by their place in the list."""

    def __init__(self, model: Model, keep: Keep, budget: int, every: int) -> None:
        shape = model.shape
        self._group, self._keep, self._budget, self._every = shape.group, keep, budget, every
        self._rope, self.length, self.held = model.rope(budget + every), 0, 0
        self._heads = {(layer, head): [] for layer in range(shape.layers) for head in range(shape.kv_heads)}
        self.longest = 0

    def begin(self, tokens, tree=None):
        assert tokens == 1
        for key, stored in self._heads.items():
            if len(stored) == self._budget + self._every:
                scores = torch.stack([score for _, _, score in stored])
                self._heads[key] = [stored[index] for index in self._keep(scores, self._budget)]

    def attend(self, layer, q, k, v):
        out = torch.empty_like(q)
        for head in range(k.shape[1]):
            stored = self._heads[layer, head]
            stored.append((k[0, head].double(), v[0, head].double(), torch.zeros((), dtype=torch.float64)))
            self.longest = max(self.longest, len(stored))
            rows = tuple(row.double() for row in self._rope.rows(0, len(stored)))
            keys = rotate(torch.stack([key for key, _, _ in stored]).unsqueeze(1), rows).squeeze(1)
            values = torch.stack([value for _, value, _ in stored])
            for each in range(head * self._group, (head + 1) * self._group):
                query = rotate(q[:, each : each + 1].double(), tuple(row[-1:] for row in rows))[0, 0]
                weights = (keys @ query * q.shape[-1] ** -0.5).softmax(0)
                out[0, each] = (weights @ values).to(q.dtype)
                for (_, _, score), weight in zip(stored, weights, strict=True):
                    score += weight
        return out

    def commit(self, keep=None):
        self.length += 1
