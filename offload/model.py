"""One decoder for the Llama family: weights, norms and MLP. It knows nothing of memory; the cache attends.

Rows are flat: `[tokens, hidden]`, whatever they are rows of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import FullCache, KVCache
from .linear import Linear
from .rope import Rope
from .shape import ModelShape


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer; q, k, v and gate, up are fused. The q and k norms are Qwen3's."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # [(heads + 2 kv_heads) * head_dim, hidden]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Linear  # [hidden, heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # [2 * intermediate, hidden]
    down: Linear  # [hidden, intermediate]


class Model:
    """A decoder with its weights on one device in one dtype."""

    def __init__(self, shape: ModelShape, embedding: Tensor, layers: list[Layer], norm: Tensor, head: Linear) -> None:
        self.shape = shape
        self._embedding = embedding  # [vocab, hidden]
        self._layers = layers
        self._norm = norm
        self._head = head

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def rope(self, length: int) -> Rope:
        """The rotations for a sequence that may reach `length` tokens, to be shared by all of its caches."""
        return Rope(self.shape, length, self.dtype, self.device)

    def new_cache(self, capacity: int, rope: Rope | None = None) -> FullCache:
        """An empty full cache with room for `capacity` tokens; the rotations are for that many unless given."""
        return FullCache(self.shape, rope or self.rope(capacity), capacity, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Run `ids` `[tokens]` as the continuation of what `cache` holds, and commit them there.

        Returns the hidden rows `[tokens, hidden]` before the final norm; `logits` turns the wanted ones into logits.
        """
        cache.begin(len(ids))
        x = self._embedding[ids]
        for index, layer in enumerate(self._layers):
            x = self._forward_layer(index, layer, x, cache)
        cache.commit()
        return x

    def _forward_layer(self, index: int, layer: Layer, x: Tensor, cache: KVCache) -> Tensor:
        shape = self.shape
        heads = layer.qkv(self._normed(x, layer.input_norm)).view(len(x), -1, shape.head_dim)
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        if layer.q_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        x = x + layer.o(cache.attend(index, q, k, v).reshape(len(x), -1))
        gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, dim=-1)
        return x + layer.down(F.silu(gate) * up)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.shape.norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[tokens, vocab]` in fp32 of hidden rows `[tokens, hidden]`."""
        return self._head(self._normed(hidden, self._norm)).float()
