"""Models with random weights and full caches with random keys and values, for measurements without a prompt."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from offload.architecture.config import ModelShape, shape_from_config
from offload.decoder import Model
from offload.kernels.ops import TorchOperations
from offload.kv_cache.full import FullCache
from offload.loading.tensor_checks import expected_sizes
from offload.loading.weights import load_model
from offload.offloading import TieredStoreFactory


def llama(layers: int, hidden: int, heads: int, intermediate: int, vocab: int, positions: int) -> ModelShape:
    """Return the shape of a Llama with one KV head per query head, as in Llama 2."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_position_embeddings=positions,
    )
    return shape_from_config(config.to_dict(), {})


class RandomCheckpoint:
    """A checkpoint whose weights are drawn on the device when they are read."""

    path = Path("random")

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self._sizes, self._dtype, self._device = expected_sizes(shape), dtype, device

    @contextmanager
    def tensors(self):
        yield self._make

    def _make(self, name: str, part: None = None) -> Tensor:
        """Return a random weight; `part` (the share of a rank) is not supported."""
        size = self._sizes[name]
        if len(size) == 1:
            return torch.ones(size, dtype=self._dtype, device=self._device)
        return torch.empty(size, dtype=self._dtype, device=self._device).normal_(std=0.02)


def random_model(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Model:
    """Return a seeded random decoder; a step takes as long as with trained weights."""
    torch.manual_seed(0)
    checkpoint = RandomCheckpoint(shape, dtype, device)
    return load_model(checkpoint, dtype, device, lambda done, total: None, TorchOperations())


def filled_cache(model: Model, spread: TieredStoreFactory, tokens: int, room: int = 64) -> FullCache:
    """Return a full cache with `tokens` tokens of random keys and values, as after a prefill."""
    store = spread.new_store(model.shape, tokens + room, model.dtype)
    tiers = store.tiers
    one = torch.empty(tiers.pages.shape[-1]).normal_(std=0.5).to(model.dtype)
    for layer in tiers.pages:  # the same page everywhere: drawing new numbers for each would take minutes
        layer.copy_(one.expand_as(layer))
    if tiers.resident is not None:
        for layer in range(tiers.resident_layers):
            tiers.resident._keys[layer].normal_(std=0.5)
            tiers.resident._values[layer].normal_(std=0.5)
    cache = model.new_cache(tokens + room, store=store)
    cache._length = tokens
    return cache


def smaller(shape: ModelShape) -> ModelShape:
    """Return the shape with half as many layers."""
    return replace(shape, layers=shape.layers // 2)
