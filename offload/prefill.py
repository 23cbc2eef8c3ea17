"""Prefill in chunks: progress after each, resumable at any of them, logits for the last token only."""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from .cache import KVCache
from .events import Prefilled
from .model import Model


def prefill(model: Model, ids: Tensor, cache: KVCache, chunk: int) -> Generator[Prefilled, None, Tensor]:
    """Bring `cache` from its committed length to all of `ids` `[tokens]`, `chunk` tokens at a time.

    Yields progress; returns the hidden row `[1, hidden]` of the last token. What is in the cache must be a proper
    prefix of `ids`. Closed early, it leaves the cache at a chunk's border, and a second call goes on from there.
    """
    assert cache.length < len(ids), "the last token must still be run: its hidden row is what decoding starts from"
    yield Prefilled(cache.length, len(ids))
    while cache.length < len(ids):
        hidden = model.forward(ids[cache.length : cache.length + chunk], cache)
        yield Prefilled(cache.length, len(ids))
    return hidden[-1:]
