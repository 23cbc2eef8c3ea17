"""A target that runs on an approximate cache instead of all its keys and values: other answers, in less memory.

A new cache that evicts tokens is one file in kv_cache, and a row here.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence

import torch
from torch import Tensor

from ...caches.evicting import EvictingCache
from ...caches.h2o import H2OCache
from ...caches.retrieval_target import REBUILD_EVERY, ROOM, RetrievedCache
from ...caches.sink import SinkCache
from ...events import Prefilled
from ...memory.device_factory import new_store
from ...model.decoder import Model
from ...sequence import TokenSequence
from ...settings.config import Speculation
from ...settings.method_sizes import forgetting_capacity, selected_chunk
from ...settings.methods import H2O, RETRIEVAL, STREAMING_LLM
from ..passes.runner import Runner

EVICTING: dict[str, type[EvictingCache]] = {STREAMING_LLM: SinkCache, H2O: H2OCache}


class ApproximateRunner(Runner):
    """A runner on a cache that limits the tokens of a pass."""

    def __init__(self, model: Model, cache: EvictingCache | RetrievedCache, chunk: int) -> None:
        super().__init__(model, cache, chunk)

    def prefill(self, sequence: TokenSequence, end: int | None = None) -> Generator[Prefilled]:
        end = len(sequence) if end is None else end
        self.truncate(self.cache.restartable(min(self._matching_prefix(sequence), end - 1)))
        yield from super().prefill(sequence, end)

    def _run(self, ids: Sequence[int]) -> Tensor:
        rows, start = [], 0
        while start < len(ids):
            end = start + min(self.cache.room, len(ids) - start)
            rows.append(super()._run(ids[start:end]))
            start = end
        return torch.cat(rows)

    def _matching_prefix(self, sequence: TokenSequence) -> int:
        if self.cache.length < self.num_cached:  # an interrupted eviction has emptied it
            self._cached.clear()
            self._last = None
        return super()._matching_prefix(sequence)


def approximation(settings: Speculation | None) -> Hashable:
    """Return everything that an approximate cache is made from, None for the full cache."""
    if settings is None or settings.approximate is None:
        return None
    sizes = settings.sink, settings.window, settings.kept_tokens, settings.chunk, settings.rebuild_every
    return settings.approximate, *sizes


def approximate_runner(model: Model, settings: Speculation, capacity: int, chunk: int) -> ApproximateRunner:
    """Return a runner on the cache that the settings ask for, of a sequence of up to `capacity` tokens."""
    sizes = settings.sink, settings.window, settings.kept_tokens
    if settings.approximate == RETRIEVAL:
        chunk = max(chunk // ROOM, 1) * ROOM  # passes end there
        full = model.new_cache(capacity)
        chunk_size = selected_chunk(settings, full.store.grain, tokens=capacity)
        cache = RetrievedCache(full, *sizes, chunk_size, settings.rebuild_every or REBUILD_EVERY)
    else:
        room = forgetting_capacity(settings)
        store = new_store(model.operations.kernel, model.shape, room, model.dtype, model.device)
        cache = EVICTING[settings.approximate](store, model.rope(room), *sizes, room)
    return ApproximateRunner(model, cache, chunk)
