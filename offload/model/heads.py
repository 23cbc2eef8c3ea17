"""Trained heads that draft from the target's hidden rows: EAGLE-3 (arXiv 2503.01840) and Qwen's MTP.

A slot of a head is a token with a feature: a row made of what the target computed for the token before it. From both
the head computes the row of the next token. As long as the target has not run a token, that row is the next feature.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.head_shape import HeadShape
from ..architecture.rope import Rope
from ..caches.streaming_llm import StreamingCache
from ..kernels.ops import Linear, Operations
from ..memory.tree_attention import Tree
from .decoder import Model
from .layer import Layer, LayerPass


class Head:
    """A head with its weights. Subclasses say what the features are, and what its layers get.

    Attributes:
        targets: the target's ids `[targets]` of the tokens that it can propose; None for all.
    """

    targets: Tensor | None = None

    def __init__(
        self,
        own: HeadShape,
        target: Model,
        operations: Operations,
        fc: Linear,
        norms: tuple[Tensor, Tensor, Tensor],
        layers: Sequence[Layer],
    ) -> None:
        """Create a head from its weights.

        Args:
            fc: of EAGLE-3 `[hidden, taps * hidden]`, of MTP `[hidden, 2 * hidden]`.
            norms: of embeddings, of features, and of the layers' output.
        """
        self.own, self.target, self.operations = own, target, operations
        self.shape: ModelShape = own.layers
        self.device, self.dtype, self.group = target.device, target.dtype, target.group
        self._fc, self._layers, self._head = fc, layers, target.output_head
        self._embedding_norm, self._feature_norm, self._output_norm = norms
        self._passes = [LayerPass(spec, self.shape, operations) for spec in self.shape.specs]

    def rope(self, length: int) -> Rope:
        """Return the rotations of `length` slots."""
        return Rope(self.shape.full_attention, length, self.dtype, self.device)

    @property
    def read_cost(self) -> float:
        """Return the bytes of weights that a step reads."""
        outside = (*self._fc.tensors(), *self._head.tensors())
        return sum(layer.linear_bytes() for layer in self._layers) + sum(x.nbytes for x in outside)

    def features(self, rows: Tensor) -> Tensor:
        """Return the features `[tokens, hidden]` that follow from rows of the target, which has the head's taps."""
        raise NotImplementedError

    def recycled(self, rows: Tensor) -> Tensor:
        """Return the features `[slots, hidden]` that follow from the head's own rows `[slots, hidden]`."""
        raise NotImplementedError

    def logits(self, rows: Tensor) -> Tensor:
        """Return logits `[slots, vocab]` in fp32 over the target's vocabulary, of the head's rows `[slots, hidden]`."""
        raise NotImplementedError

    def own_logits(self, rows: Tensor) -> Tensor:
        """Return logits `[slots, targets]` in fp32 of its `targets` alone."""
        raise NotImplementedError

    def _through(self, ids: Tensor, features: Tensor, cache: StreamingCache) -> Tensor:
        raise NotImplementedError

    @torch.inference_mode()
    def run(self, ids: Tensor, features: Tensor, cache: StreamingCache, tree: Tree | None = None) -> Tensor:
        """Run slots of tokens `[slots]` and `features` behind those in the cache; return rows `[slots, hidden]`.

        With a `tree`, they are its last nodes, and the others are held in the cache, where all are afterwards.
        """
        cache.begin(len(ids), tree)
        rows = self._through(ids, features, cache)
        cache.commit() if tree is None else cache.hold()
        return rows

    def _layer(self, index: int, x: Tensor, cache: StreamingCache, normed: Tensor | None = None) -> Tensor:
        """Return the rows behind a layer, which may overwrite `x`; `normed` are its normalised inputs."""
        run = self._passes[index % len(self._passes)].run
        return run(self._layers[index], x, partial(cache.attend, index), normed=normed)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._passes[0].norm(x, weight)

    def _beside(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """Return both, normalised, side by side: `[slots, 2 * hidden]`."""
        both = torch.empty((len(features), 2 * self.shape.hidden), dtype=self.dtype, device=self.device)
        both[:, : self.shape.hidden] = self._norm(embeddings, self._embedding_norm)
        both[:, self.shape.hidden :] = self._norm(features, self._feature_norm)
        return both


class Eagle3(Head):
    """EAGLE-3: the rows of some of the target's layers, and a vocabulary of frequent tokens."""

    def __init__(
        self,
        *weights: Any,
        embedding: Callable[[Tensor], Tensor],
        head: Linear,
        targets: Tensor | None,
        input_norms: Sequence[Tensor] = (),
    ) -> None:
        """Create a head; `weights` are those of `Head`.

        Args:
            embedding: maps token ids `[slots]` to rows `[slots, hidden]`.
            head: `[vocab of the head, hidden]`.
            targets: the target's ids of the head's tokens; None if they are the same.
            input_norms: of all taps together, or of each.
        """
        super().__init__(*weights)
        self._embedding, self._head, self.targets = embedding, head, targets
        self._input_norms = input_norms

    def features(self, rows: Tensor) -> Tensor:
        taps = self.target.tapped(rows, self.own.taps)
        if self._input_norms:
            parts = taps.chunk(len(self._input_norms), dim=1)
            norms = zip(parts, self._input_norms, strict=True)
            taps = torch.cat([self._norm(part.contiguous(), weight).clone() for part, weight in norms], dim=1)
        return self._fc(taps).clone()

    def recycled(self, rows: Tensor) -> Tensor:
        return self._norm(rows, self._output_norm).clone() if self.own.norm_output else rows

    def _through(self, ids: Tensor, features: Tensor, cache: StreamingCache) -> Tensor:
        both = self._beside(self._embedding(ids), features)
        residual = both[:, self.shape.hidden :] if self.own.norm_before_residual else features
        x = self._layer(0, residual.clone(), cache, both)
        for index in range(1, self.shape.layers):
            x = self._layer(index, x, cache)
        return x

    @torch.inference_mode()
    def own_logits(self, rows: Tensor) -> Tensor:
        return self._head.wide(self._norm(rows, self._output_norm))

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        logits = self.own_logits(rows)
        if self.targets is None:
            return logits
        every = logits.new_full((len(rows), self.target.shape.vocab), float("-inf"))
        return every.index_copy_(1, self.targets, logits)


class MTP(Head):
    """Multi-token prediction of Qwen3-Next and Qwen3.5: the target's embedding, output and output head."""

    def features(self, rows: Tensor) -> Tensor:
        return self.target.normed(rows).clone()

    def recycled(self, rows: Tensor) -> Tensor:
        return self._norm(rows, self._output_norm).clone()

    def _through(self, ids: Tensor, features: Tensor, cache: StreamingCache) -> Tensor:
        x = self._fc(self._beside(self.target.embed(ids), features)).clone()
        return self._layer(0, x, cache)

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        return self.target.head(self._norm(rows, self._output_norm))
