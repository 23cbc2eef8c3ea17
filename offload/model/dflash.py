"""DFlash: drafts a block of tokens in one pass, from rows of the target's layers (z-lab/dflash).

What the target computed for a token gives it a slot with keys and values in every layer. The queries of a block, of the
last token and of mask tokens, attend to these slots and to each other. DSpark (deepseek-ai/DeepSpec) adds a bias to the
logits, by the token before.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..architecture.dflash_shape import DFlashShape
from ..caches.streaming_llm import StreamingCache
from ..kernels.attention import attend
from ..kernels.ops import Linear
from .heads import Head


class DraftBlockCache(StreamingCache):
    """Attends to a window of committed slots, which have keys and values alone, and to a block that is never committed.

    `causal` says for each layer whether a token of the block sees only those before it.
    """

    causal: Sequence[bool] = ()

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values `[slots, kv_heads, head_dim]` of the pass's slots, which attend to nothing."""
        self._store(0, layer, k, v)

    def _attend_in_order(self, layer: int, q: Tensor, keys: Tensor, values: Tensor, lse: Tensor | None) -> Tensor:
        if self.causal[layer]:
            return super()._attend_in_order(layer, q, keys, values, lse)
        return attend(q, keys, values).out.to(q.dtype)


class DFlash(Head):
    """A DFlash drafter with its weights; embedding and output head are the target's."""

    own: DFlashShape

    def __init__(self, *weights: Any, markov: tuple[Callable[[Tensor], Tensor], Linear] | None = None) -> None:
        """Create a drafter; `weights` are those of `Head`.

        `markov` maps token ids to rows `[tokens, rank]`, and these to biases: `[vocab, rank]`.
        """
        super().__init__(*weights)
        self._markov = markov

    @torch.inference_mode()
    def biased(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return logits `[tokens, vocab]` behind tokens `[tokens]`, with the biases by these if there are any."""
        if self._markov is None:
            return logits
        rows, bias = self._markov
        return logits + bias.wide(rows(ids))

    def features(self, rows: Tensor) -> Tensor:
        return self._norm(self._fc(self.target.tapped(rows, self.own.taps)), self._feature_norm).clone()

    @torch.inference_mode()
    def note(self, features: Tensor, cache: DraftBlockCache) -> None:
        """Commit the slots of `features` `[slots, hidden]` behind those in the cache."""
        cache.begin(len(features))
        for index, layer in enumerate(self._layers):
            _, _, k, v = self._passes[index % len(self._passes)].project(layer, features)
            assert k is not None and v is not None
            cache.put(index, k, v)
        cache.commit()

    @torch.inference_mode()
    def block(self, ids: Tensor, cache: DraftBlockCache) -> Tensor:
        """Return the rows `[tokens, hidden]` of a block of tokens `[tokens]` behind the slots in the cache."""
        cache.causal = self.own.causal
        cache.begin(len(ids))  # and never commit: the target's rows will be there
        x = self.target.embedding(ids) * self.own.input_scale
        for index, layer in enumerate(self._layers):
            x = self._passes[index % len(self._passes)].run(layer, x, partial(cache.attend, index))
        return x

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        logits = self.target.output_head.wide(self._norm(rows, self._output_norm)) * self.own.output_scale
        cap = self.own.output_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits
