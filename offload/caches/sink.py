"""The cache of attention sinks, StreamingLLM (arXiv 2309.17453), for a target that runs on nothing else.

A draft model's is streaming_llm.py: its window ends with each pass, and small rollbacks are always possible.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..architecture.rope import Rope
from ..memory.store import Store
from .evicting import EvictingCache


class SinkCache(EvictingCache):
    """Keeps the first `sink` tokens and the latest ones."""

    def __init__(self, store: Store, rope: Rope, sink: int, window: int, budget: int, capacity: int) -> None:
        """`window` is not used: the latest tokens are as many as the budget leaves beside the sink."""
        assert sink < budget, "some of the latest tokens are kept"
        super().__init__(store, rope, budget, capacity)
        latest = torch.arange(capacity - budget + sink, capacity)
        kept = torch.cat((torch.arange(sink), latest)).to(store.device)
        self._kept = kept.expand(store.shape.kv_heads, -1)

    def keep(self, layer: int) -> Tensor:
        return self._kept
