"""Forward passes of a few tokens on the native kernel: their calls are recorded once, and then run by one call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ..decoder import Model
from ..kernels.native.recording import PassInputs, Recording
from ..kv_cache.full import KVCache, RecordableCache
from ..kv_cache.tree import Tree
from ..levels import KEPT_QUERIES

_MOST_ROWS = 256  # of a cache's recordings together: a row of a model with 8 billion weights has buffers of 130 KB


def recorded_passes(model: Model, cache: KVCache) -> RecordedPasses | None:
    """Return a model's recorded passes over a cache, or None if they are not native kernel calls alone."""
    is_recordable = model.is_recordable and getattr(cache, "is_recordable", False)
    return RecordedPasses(model, cache) if is_recordable else None


class _Recorded(NamedTuple):
    calls: Recording
    rows: Tensor  # [tokens, hidden], of the embedding
    hidden: Tensor  # [tokens, hidden], the result; may be the same memory


class RecordedPasses:
    """Runs a model's passes over one cache from recordings, one for each number of rows."""

    def __init__(self, model: Model, cache: RecordableCache) -> None:
        self._model, self._cache = model, cache
        self._recorded: OrderedDict[tuple[int, Hashable], _Recorded] = OrderedDict()

    def serves(self, tokens: int) -> bool:
        """Return whether a pass of so many tokens is recorded; longer ones gain little."""
        return tokens <= KEPT_QUERIES

    def prepare(self) -> None:
        """Do nothing: to record a pass takes no longer than to run it call by call."""

    @torch.inference_mode()
    def forward(self, ids: Tensor) -> Tensor:
        """Run `Model.forward` over the cache."""
        hidden = self._run(ids, *self._cache.begin_recorded(len(ids)))
        self._cache.commit()
        return hidden

    @torch.inference_mode()
    def forward_tree(self, ids: Tensor, tree: Tree) -> Tensor:
        """Run `Model.forward_tree` over the cache."""
        hidden = self._run(ids, *self._cache.begin_recorded(len(ids), tree))
        self._cache.hold()
        return hidden

    def _run(self, ids: Tensor, key: Hashable, inputs: PassInputs) -> Tensor:
        recorded = self._find(ids, (len(ids), key))
        recorded.rows.copy_(self._model.embed(ids))
        recorded.calls.run(self._model.operations.kernel, inputs)
        return recorded.hidden.clone()  # the next pass writes to the same memory

    def _find(self, ids: Tensor, key: tuple[int, Hashable]) -> _Recorded:
        if key not in self._recorded:
            self._recorded[key] = self._record(ids)
            while len(self._recorded) > 1 and sum(rows for rows, _ in self._recorded) > _MOST_ROWS:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(key)
        return self._recorded[key]

    def _record(self, ids: Tensor) -> _Recorded:
        rows = self._model.embed(ids).clone()
        with self._model.operations.record() as calls:
            hidden = self._model.through_layers(rows, self._cache)
        return _Recorded(calls, rows, hidden)
