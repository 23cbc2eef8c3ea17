"""Plain autoregressive decoding: the level that every other one is measured against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .cache import KVCache
from .model import Model
from .sampling import Sampler


def autoregressive(model: Model, cache: KVCache, hidden: Tensor, sampler: Sampler) -> Iterator[int]:
    """Tokens one after the other, without end; the caller stops asking.

    `hidden` `[1, hidden]` is the row of the last committed token. A token is run through the model only when the next
    one is asked for, so the cache always holds the sequence up to, not including, the token yielded last.
    """
    while True:
        token = sampler.pick(model.logits(hidden)[0])
        sampler.observe([token])
        yield token
        hidden = model.forward(torch.tensor([token], device=model.device), cache)
