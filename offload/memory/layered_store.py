"""A store whose first layers are resident: they lie in a store in the device's memory, the others over tiers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.rope import Rows
from .store import DeviceStore, Store
from .tiers import Tiers
from .tree_attention import Tree


class LayeredStore(Store):
    """The layers of `resident`, and behind them those of `tiered`; `new_device_store` makes stores for all of them."""

    def __init__(
        self,
        shape: ModelShape,
        resident: Store,
        tiered: Any,
        new_device_store: Callable[[int], DeviceStore],
    ) -> None:
        self.shape, self.dtype, self.device = shape, tiered.dtype, tiered.device
        self.resident, self.tiered, self._new_device_store = resident, tiered, new_device_store
        self.kernel, self.grain, self.page_tokens = tiered.kernel, tiered.grain, tiered.page_tokens
        self.read_cost, self.mean_keys_cost = tiered.read_cost, tiered.mean_keys_cost

    @property
    def tiers(self) -> Tiers[Any]:
        return self.tiered.tiers

    @property
    def has_planes(self) -> bool:
        return self.tiered.has_planes

    @property
    def resident_layers(self) -> int:
        return self.resident.shape.layers

    def _of(self, layer: int) -> tuple[Store, int]:
        """Return the store that has a layer, and the layer's number there."""
        first = self.resident_layers
        return (self.resident, layer) if layer < first else (self.tiered, layer - first)

    def prepare(self) -> Iterator[tuple[int, int]]:
        return self.tiered.prepare()

    def begin(self, start: int, tokens: int, chunk: int | None = None, held: int = 0) -> None:
        self.resident.begin(start, tokens, chunk, held)
        self.tiered.begin(start, tokens, chunk, held)

    def begin_draft(self, start: int, tokens: int) -> None:
        self.resident.begin_draft(start, tokens)

    def open_draft(self, start: int, end: int) -> None:
        self.tiered.open_draft(start, end)

    def end(self) -> None:
        self.resident.end()
        self.tiered.end()

    def truncate(self, length: int) -> None:
        self.resident.truncate(length)
        self.tiered.truncate(length)

    def restartable(self, length: int) -> int:
        return self.resident.restartable(self.tiered.restartable(length))

    def append(self, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, *stored: int) -> Tensor:
        store, layer = self._of(layer)
        return store.append(layer, start, q, k, v, rows, *stored)

    def attend(self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None) -> Tensor:
        store, layer = self._of(layer)
        return store.attend(layer, q, start, tree, lse)

    def attend_plane(
        self, layer: int, q: Tensor, start: int, tree: Tree | None = None, lse: Tensor | None = None
    ) -> Tensor:
        store, layer = self._of(layer)
        return store.attend_plane(layer, q, start, tree, lse)

    def compact(self, start: int, keep: Sequence[int]) -> None:
        self.resident.compact(start, keep)
        self.tiered.compact(start, keep)

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        keys, values = map(torch.cat, zip(self.resident.read(start, end), self.tiered.read(start, end), strict=True))
        return keys, values

    def export(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        both = self.resident.export(start, end), self.tiered.export(start, end)
        keys, values = map(torch.cat, zip(*both, strict=True))
        return keys, values

    def dump(self, start: int, end: int) -> Tensor:
        return torch.cat((self.resident.dump(start, end), self.tiered.dump(start, end)))

    def load(self, start: int, kv: Tensor) -> None:
        self.resident.load(start, kv[: self.resident_layers])
        self.tiered.load(start, kv[self.resident_layers :])

    def new_device_store(self, capacity: int) -> DeviceStore:
        return self._new_device_store(capacity)

    def gather(self, rows: Tensor, chunks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        first, shape = self.resident_layers * self.shape.kv_heads, (len(rows), size, self.shape.head_dim)
        keys, values = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        for store, some, before in ((self.tiered, rows >= first, first), (self.resident, rows < first, 0)):
            if some.any():
                keys[some], values[some] = store.gather(rows[some] - before, chunks[some], size)
        return keys, values

    def mean_keys(self, layer: int, start: int, end: int, chunk: int) -> Tensor:
        store, layer = self._of(layer)
        return store.mean_keys(layer, start, end, chunk)

    def keep_mean_keys(self, chunk: int) -> None:
        self.tiered.keep_mean_keys(chunk)
