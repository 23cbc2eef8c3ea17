"""Scores of a full cache's chunks: the product of a query and each chunk's mean key, by layer and KV head.

On a CPU the mean keys of all layers are kept. A GPU reads the keys of its resident layers faster than it could spare
the memory for their mean keys, so those are computed anew for every selection; of layers in host memory, which are
slow to read, mean keys are kept in 8 bits.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..architecture.pages import SCORED_BYTES
from ..kernels.native.kernel import Kernel
from ..kernels.native.layout import new_key_panels, write_key_panels
from ..memory.store import Store

_SMALLEST_SCALE = 1e-20  # of a mean key: that of zeros


class KeptMeanKeys:
    """Scores from the mean keys of all layers, kept in the store's dtype and computed only for new chunks.

    `kept` counts the first chunks whose mean keys are kept.
    """

    _first = 0  # the first layer whose mean keys are kept

    def __init__(self, store: Store, chunk: int, room: int) -> None:
        """`room`: chunks of the store's capacity."""
        shape = store.shape
        self._store, self._chunk = store, chunk
        self.kept = 0
        self._means = self._new_means(room)
        # Chunks whose keys are averaged at once: a mean in fp32 of keys in bf16 copies them to fp32 first.
        self._size = max(SCORED_BYTES // (4 * shape.kv_heads * shape.head_dim * chunk), 1)

    def _new_means(self, room: int) -> Tensor:
        """Return memory for mean keys, `[layers, kv_heads, ...]`."""
        shape = self._store.shape
        size = (shape.layers, shape.kv_heads, room, shape.head_dim)
        return torch.empty(size, dtype=self._store.dtype, device=self._store.device)

    def extend(self, chunks: int) -> None:
        """Keep the mean keys of the first `chunks` chunks."""
        for start, end in self._slices(self.kept, chunks):
            for layer in range(self._first, self._store.shape.layers):
                self._write(layer - self._first, start, self._mean_keys(layer, start, end))
        self.kept = max(self.kept, chunks)

    def _slices(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        return ((first, min(first + self._size, end)) for first in range(start, end, self._size))

    def _mean_keys(self, layer: int, start: int, end: int) -> Tensor:
        return self._store.mean_keys(layer, start * self._chunk, end * self._chunk, self._chunk)

    def scores(self, query: Tensor, chunks: int) -> Iterator[Tensor]:
        """Yield the scores of the first `chunks` chunks in fp32, `[rows, chunks]`: all layers' rows in order.

        A row is layer * kv_heads + KV head; query `[layers, kv_heads, head_dim]` in fp32.
        """
        self.extend(chunks)
        yield self._products(query.to(self._means.dtype).flatten(0, 1), chunks)

    def _write(self, layer: int, first: int, means: Tensor) -> None:
        """Keep the mean keys `[kv_heads, n, head_dim]` of chunks from `first` on."""
        self._means[layer][:, first : first + means.shape[1]] = means

    def _products(self, query: Tensor, chunks: int) -> Tensor:
        """Return the products with a query `[rows, head_dim]` in fp32, `[rows, chunks]`."""
        means = self._means[:, :, :chunks].flatten(0, 1)
        return torch.bmm(means, query.unsqueeze(-1)).squeeze(-1).float()

    def truncate(self, chunks: int) -> None:
        """Note that the tokens of all but the first `chunks` chunks may have changed."""
        self.kept = min(self.kept, chunks)


class PanelMeanKeys(KeptMeanKeys):
    """The same in panels of 16, which the native kernel multiplies: sums are in fp32, and it has its own threads."""

    def __init__(self, store: Store, chunk: int, room: int, kernel: Kernel) -> None:
        super().__init__(store, chunk, room)
        self._kernel = kernel

    def _new_means(self, room: int) -> Tensor:
        shape = self._store.shape
        panels = new_key_panels(shape.layers * shape.kv_heads, room, shape.head_dim, self._store.dtype)
        return panels.unflatten(0, (shape.layers, shape.kv_heads))

    def _write(self, layer: int, first: int, means: Tensor) -> None:
        write_key_panels(self._means[layer], first, means)

    def _products(self, query: Tensor, chunks: int) -> Tensor:
        products = torch.empty((len(query), chunks), dtype=torch.float32)
        self._kernel.score_keys(query, self._means.flatten(0, 1), products)
        return products


class LayerScores(KeptMeanKeys):
    """Scores layer by layer: of resident layers from their keys, of the others from mean keys kept in 8 bits.

    A mean key is kept as integers with one scale, its largest number divided by 127.
    """

    def __init__(self, store: Store, chunk: int, room: int) -> None:
        """`room`: chunks of the store's capacity. Its resident layers keep no mean keys."""
        self._first = store.resident_layers
        super().__init__(store, chunk, room)
        self._size *= chunk  # chunks that are scored at once
        self._scales = torch.empty(self._means.shape[:3], dtype=torch.float32, device=store.device)

    def _new_means(self, room: int) -> Tensor:
        shape = self._store.shape
        size = (shape.layers - self._first, shape.kv_heads, room, shape.head_dim)
        return torch.empty(size, dtype=torch.int8, device=self._store.device)

    def scores(self, query: Tensor, chunks: int) -> Iterator[Tensor]:
        self.extend(chunks)
        for layer, own in enumerate(query.unsqueeze(-1)):
            products = torch.empty((len(own), chunks), dtype=torch.float32, device=query.device)
            for start, end in self._slices(0, chunks):
                if layer < self._first:
                    products[:, start:end] = torch.bmm(self._mean_keys(layer, start, end), own).squeeze(-1)
                else:
                    at = (layer - self._first, slice(None), slice(start, end))
                    products[:, start:end] = torch.bmm(self._means[at].float(), own).squeeze(-1) * self._scales[at]
            yield products

    def _write(self, layer: int, first: int, means: Tensor) -> None:
        some = slice(first, first + means.shape[1])
        self._scales[layer, :, some] = scales = means.abs().amax(-1).div_(127).clamp_(min=_SMALLEST_SCALE)
        self._means[layer, :, some] = means.div_(scales.unsqueeze(-1)).round_()


def chunk_scores(store: Store, chunk: int, room: int) -> KeptMeanKeys:
    """Return the scores that fit the device of a store with `room` chunks."""
    if store.device.type != "cpu":
        return LayerScores(store, chunk, room)
    return KeptMeanKeys(store, chunk, room) if store.kernel is None else PanelMeanKeys(store, chunk, room, store.kernel)
