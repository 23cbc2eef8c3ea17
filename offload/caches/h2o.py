"""The heavy-hitter cache, H2O (arXiv 2306.14048), in its streaming form: positions are inside the cache."""

import torch
from torch import Tensor

from ..settings.config import Speculation
from .evicting import EvictingCache
from .full import FullCache


class H2OCache(EvictingCache):
    """Keeps the first `sink` tokens, the latest `window` ones, and those that received the most attention.

    A token's score is the sum of the softmax weights with which all later tokens, and itself, have attended to it
    (algorithm 1), summed over the query heads of its KV head as well. Each layer and KV head has its own tokens.
    """

    observes = True

    def __init__(self, full: FullCache, settings: Speculation) -> None:
        super().__init__(full, settings)
        self._sink, self._window = settings.sink, settings.window
        shape = full.store.shape
        self._scores = torch.zeros((shape.layers, shape.kv_heads, self.capacity), device=self.device)

    def observe(self, layer: int, received: Tensor) -> None:
        self._scores[layer] += received

    def keep(self, layer: int, stored: int) -> Tensor:
        scores = self._scores[layer]
        ranked = scores.clone()
        ranked[:, : self._sink] = ranked[:, stored - self._window :] = float("inf")
        kept = ranked.topk(self.budget).indices.sort().values
        scores[:, : self.budget] = scores.gather(1, kept)
        scores[:, self.budget :] = 0
        return kept

    def forget(self) -> None:
        self._scores.zero_()
