"""Selection of the chunks that have received the most attention, as H2O keeps tokens (arXiv 2306.14048)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .full import FullCache
from .selection import RetrievalSelector

QUERIES = 8  # of each pass over a prompt, the newest ones


class HeavyHitterSelector(RetrievalSelector):
    """Selects the chunks with the largest sum of attention over the queries observed so far, and the recent ones.

    Observed are the newest queries of each pass over a prompt, and the newest one at each selection. A chunk's share of
    a query's attention is estimated from its mean key. Later tokens of a rejected draft leave no trace.
    """

    recent_share = 4

    def __init__(self, sink: int, chunk: int) -> None:
        super().__init__(sink, chunk)
        self._received: Tensor | None = None  # [layers * kv_heads, chunks of the capacity], attention in fp32

    def observe(self, full: FullCache) -> None:
        """Observe the newest queries of a pass over a prompt."""
        self._add(full, QUERIES)

    def _batches(self, full: FullCache, chunks: int) -> Iterator[Tensor]:
        self._add(full, 1)
        if self._received is None:
            return super()._batches(full, chunks)
        return iter([self._received[:, :chunks].clone()])

    def _add(self, full: FullCache, most: int) -> None:
        self.truncate(full.marks.update(self, full.length))
        shape, chunks = full.store.shape, full.length // self._chunk
        for query in full.queries(most) if chunks else ():
            scores = torch.cat(list(self._scores_of(query, full, chunks)))
            if self._received is None:
                size = (shape.layers * shape.kv_heads, full.capacity // self._chunk)
                with torch.inference_mode(False):  # an inference tensor could not be truncated outside that mode
                    self._received = torch.zeros(size, device=scores.device)
            self._received[:, :chunks] += (scores * shape.head_dim**-0.5).softmax(dim=-1)

    def truncate(self, length: int) -> None:
        super().truncate(length)
        if self._received is not None:
            self._received[:, length // self._chunk :] = 0
