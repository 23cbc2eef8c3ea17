"""Scores of a full cache's chunks: the product of a query and each chunk's mean key, by layer and KV head.

On a CPU the mean keys of all layers are kept. A GPU reads the keys of its resident layers faster than it could spare
the memory for their mean keys, so those are computed anew for every selection; of layers in host memory, which are
slow to read, mean keys are kept in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ..architecture.footprint import SCORED_BYTES
from .store import Store

_SMALLEST_SCALE = 1e-20  # of a mean key: that of zeros


class ChunkScores(Protocol):
    """Computes scores; keeps what it needs for the next time: mean keys of the first `kept` chunks."""

    kept: int

    def scores(self, query: Tensor, chunks: int) -> Iterator[Tensor]:
        """Yield the scores of the first `chunks` chunks in fp32, `[rows, chunks]`: all layers' rows in order.

        A row is layer * kv_heads + KV head; query `[layers, kv_heads, head_dim]` in fp32.
        """
        ...

    def truncate(self, chunks: int) -> None:
        """Note that the tokens of all but the first `chunks` chunks may have changed."""
        ...


class KeptMeanKeys:
    """Scores from the mean keys of all layers, kept in the store's dtype and computed only for new chunks."""

    def __init__(self, store: Store, chunk: int, room: int) -> None:
        """`room`: chunks of the store's capacity."""
        shape = store.shape
        self._store, self._chunk = store, chunk
        self.kept = 0
        size = (shape.layers, shape.kv_heads, room, shape.head_dim)
        self._means = torch.empty(size, dtype=store.dtype, device=store.device)

    def scores(self, query: Tensor, chunks: int) -> Iterator[Tensor]:
        if chunks > self.kept:
            start, end = self.kept * self._chunk, chunks * self._chunk
            for layer, means in enumerate(self._means):
                means[:, self.kept : chunks] = self._store.mean_keys(layer, start, end, self._chunk)
            self.kept = chunks
        means = self._means[:, :, :chunks].flatten(0, 1)
        yield torch.bmm(means, query.to(means.dtype).flatten(0, 1).unsqueeze(-1)).squeeze(-1).float()

    def truncate(self, chunks: int) -> None:
        self.kept = min(self.kept, chunks)


class LayerScores:
    """Scores layer by layer: of resident layers from their keys, of the others from mean keys kept in 8 bits.

    A mean key is kept as integers with one scale, its largest number divided by 127.
    """

    def __init__(self, store: Store, chunk: int, room: int, resident: int | None = None) -> None:
        """`room`: chunks of the store's capacity; `resident` layers keep no mean keys, None for the store's own."""
        shape = store.shape
        self._store, self._chunk = store, chunk
        self.kept = 0
        self._size = max(SCORED_BYTES // (4 * shape.kv_heads * shape.head_dim), 1)  # chunks that are scored at once
        self._first = (
            store.resident_layers if resident is None else resident
        )  # the first layer whose mean keys are kept
        size = (shape.layers - self._first, shape.kv_heads, room, shape.head_dim)
        self._means = torch.empty(size, dtype=torch.int8, device=store.device)
        self._scales = torch.empty(size[:3], dtype=torch.float32, device=store.device)

    def scores(self, query: Tensor, chunks: int) -> Iterator[Tensor]:
        self._keep_new(chunks)
        for layer, each in enumerate(query.unsqueeze(-1)):
            found = torch.empty((len(each), chunks), dtype=torch.float32, device=query.device)
            for start, end in self._slices(0, chunks):
                if layer < self._first:
                    means = self._store.mean_keys(layer, start * self._chunk, end * self._chunk, self._chunk)
                    found[:, start:end] = torch.bmm(means, each).squeeze(-1)
                else:
                    at = (layer - self._first, slice(None), slice(start, end))
                    found[:, start:end] = torch.bmm(self._means[at].float(), each).squeeze(-1) * self._scales[at]
            yield found

    def _keep_new(self, chunks: int) -> None:
        for start, end in self._slices(self.kept, chunks):
            for kept in range(len(self._means)):
                means = self._store.mean_keys(self._first + kept, start * self._chunk, end * self._chunk, self._chunk)
                scales = means.abs().amax(-1).div_(127).clamp_(min=_SMALLEST_SCALE)
                self._means[kept, :, start:end] = means.div_(scales.unsqueeze(-1)).round_()
                self._scales[kept, :, start:end] = scales
        self.kept = max(self.kept, chunks)

    def _slices(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        return ((first, min(first + self._size, end)) for first in range(start, end, self._size))

    def truncate(self, chunks: int) -> None:
        self.kept = min(self.kept, chunks)


def chunk_scores(store: Store, chunk: int, room: int) -> ChunkScores:
    """Return the scores that fit the device of a store with `room` chunks."""
    return (KeptMeanKeys if store.device.type == "cpu" else LayerScores)(store, chunk, room)
