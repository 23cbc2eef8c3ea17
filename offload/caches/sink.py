"""The cache of attention sinks, StreamingLLM (arXiv 2309.17453), for a target that runs on nothing else.

A draft model's is streaming_llm.py: its window ends with each pass, and small rollbacks are always possible.
"""

import torch
from torch import Tensor

from ..settings.config import Speculation
from .evicting import EvictingCache
from .full import FullCache


class SinkCache(EvictingCache):
    """Keeps the first `sink` tokens and the latest ones, as many as the budget leaves beside the sink."""

    def __init__(self, full: FullCache, settings: Speculation) -> None:
        super().__init__(full, settings)
        latest = torch.arange(self.capacity - self.budget + settings.sink, self.capacity)
        kept = torch.cat((torch.arange(settings.sink), latest)).to(self.device)
        self._kept = kept.expand(full.store.shape.kv_heads, -1)

    def keep(self, layer: int, stored: int) -> Tensor:
        return self._kept
