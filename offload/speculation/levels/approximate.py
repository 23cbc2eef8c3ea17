"""A target that runs on an approximate cache instead of all its keys and values: other answers, in less memory."""

from collections.abc import Generator, Hashable, Sequence

import torch
from torch import Tensor

from ...caches.evicting import EvictingCache
from ...events import Prefilled
from ...memory.factory import new_device_store
from ...model.decoder import Model
from ...sequence import TokenSequence
from ...settings.config import Speculation
from ...settings.kv_formats import KV_FORMATS
from ...settings.method_sizes import forgetting_capacity
from ...settings.methods import APPROXIMATIONS
from ...settings.validation import require
from ..passes.runner import Runner


class ApproximateRunner(Runner):
    """A runner on a cache that limits the tokens of a pass."""

    def __init__(self, model: Model, cache: EvictingCache, chunk: int) -> None:
        super().__init__(model, cache, chunk)

    def prefill(self, sequence: TokenSequence, end: int | None = None) -> Generator[Prefilled]:
        end = len(sequence) if end is None else end
        self.truncate(self.cache.restartable(min(self._matching_prefix(sequence), end - 1)))
        yield from super().prefill(sequence, end)
        if end == len(sequence):
            self.cache.end_prompt()

    def forward(self, ids: Tensor, parents: Sequence[int] | None = None) -> Tensor:
        assert parents is None, "an approximate cache has no trees"
        rows, start = [], 0
        while start < len(ids):
            end = start + min(self.cache.room, len(ids) - start)
            rows.append(super().forward(ids[start:end]))
            start = end
        return torch.cat(rows)

    def _matching_prefix(self, sequence: TokenSequence) -> int:
        if self.cache.length < self.num_cached:  # an interrupted eviction has emptied it
            self.cache.truncate(0)
            self._cached.clear()
            self._last = None
        return super()._matching_prefix(sequence)


def approximation(settings: Speculation | None) -> Hashable:
    """Return everything that an approximate cache is made from, None for the full cache."""
    if settings is None or settings.approximate is None:
        return None
    reads = (name for name in APPROXIMATIONS[settings.approximate].reads if name != "budget")
    return settings.approximate, settings.kept_tokens, *(getattr(settings, name) for name in reads)


def approximate_runner(model: Model, settings: Speculation, chunk: int) -> ApproximateRunner:
    """Return a runner on the cache that the settings ask for, of keys and values as they are.

    Raises SettingsError if they are to be quantised.
    """
    assert settings.approximate is not None
    require(
        not KV_FORMATS[model.kv].lossy,
        f"{model.kv} keys and values and the approximate cache {settings.approximate} cannot be used together",
        "leave one of the two out",
    )
    row, capacity = APPROXIMATIONS[settings.approximate], forgetting_capacity(settings)
    kernel, shape = model.operations.kernel, model.shape.full_attention
    store = new_device_store(kernel, shape, capacity, model.dtype, model.device)
    cache: EvictingCache = row.load()(model.new_cache(capacity, store=store), settings)
    return ApproximateRunner(model, cache, chunk)
