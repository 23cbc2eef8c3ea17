"""Models with random weights and full caches with random keys and values, for measurements without a prompt."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor
from transformers import LlamaConfig

from offload.architecture.config import ModelShape
from offload.architecture.hf_config import shape_from_config
from offload.caches.full import FullCache
from offload.kernels.ops import TorchOperations
from offload.loading.formats.tensor_checks import expected_tensors
from offload.loading.weights import load_model
from offload.memory.factory import TieredStoreFactory
from offload.model.decoder import Model
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from offload.weight_offloading.layer_stream import WeightTier

_STEP = 37  # numbers between the windows of two pages: no multiple of a head or of a block


def llama(
    layers: int, hidden: int, heads: int, intermediate: int, vocab: int, positions: int, kv_heads: int | None = None
) -> ModelShape:
    """Return the shape of a Llama; by default with one KV head per query head, as in Llama 2."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_position_embeddings=positions,
    )
    return shape_from_config(config.to_dict(), {})


class RandomCheckpoint:
    """A checkpoint whose weights are drawn on the device when they are read, the same ones whenever that is."""

    path = Path("random")

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self._sizes, self._dtype, self._device = dict(expected_tensors(shape)), dtype, device

    @contextmanager
    def tensors(self):
        yield self

    def __call__(self, name: str, part: None = None) -> Tensor:
        """Return a random weight; `part` (the share of a rank) is not supported."""
        size = self._sizes[name]
        if len(size) == 1:
            return torch.ones(size, dtype=self._dtype, device=self._device)
        random = torch.Generator(self._device).manual_seed(crc32(name.encode()))
        return torch.empty(size, dtype=self._dtype, device=self._device).normal_(std=0.02, generator=random)

    def quantized(self, name: str) -> None:
        """Return that no weight is quantised."""


def random_model(shape: ModelShape, dtype: torch.dtype, device: torch.device, tier: WeightTier | None = None) -> Model:
    """Return a seeded random decoder; a step takes as long as with trained weights."""
    torch.manual_seed(0)
    checkpoint = RandomCheckpoint(shape, dtype, device)
    return load_model(checkpoint, dtype, device, lambda done, total: None, TorchOperations(), tier)


def filled_cache(model: Model, spread: TieredStoreFactory, tokens: int, room: int = 64) -> FullCache:
    """Return a full cache with `tokens` tokens of random keys and values, as after a prefill."""
    store = spread.new_store(model.shape, tokens + room, model.dtype)
    _fill_pages(store.tiers.pages, model.dtype)
    for layer in range(store.resident_layers):
        for resident in store.resident.layer(layer):
            resident.normal_(std=0.5)
    cache = model.new_cache(tokens + room, store=store)
    cache.length = tokens
    return cache


def _fill_pages(layers: Tensor, dtype: torch.dtype) -> None:
    """Fill pages `[layers, pages, numbers]` with random numbers, each page with others.

    They are windows of one random vector: to draw new ones for each page would take minutes.
    """
    count, numbers = layers.shape[0] * layers.shape[1], layers.shape[2]
    random = torch.empty(numbers + _STEP * count).normal_(std=0.5, generator=torch.Generator().manual_seed(1)).to(dtype)
    for number in range(count):
        layers[number // layers.shape[1], number % layers.shape[1]].copy_(random[_STEP * number :][:numbers])


def same_cache(model: Model, cache: FullCache, room: int = 64) -> FullCache:
    """Return a full cache on the device with the keys and values of another one, read page by page."""
    copied = model.new_cache(cache.length + room)
    piece = 4096
    for start in range(0, cache.length, piece):
        both = cache.store.read(start, min(start + piece, cache.length))
        copied.store.write(start, *(x.to(model.device) for x in both))
    copied.length = cache.length
    return copied


class _Attended:
    """A cache that keeps what it answers: the attention of each layer."""

    def __init__(self, cache: FullCache) -> None:
        self._cache, self.found = cache, []

    def __getattr__(self, name: str) -> object:
        return getattr(self._cache, name)

    def attend(self, layer: int, *projected: Tensor) -> Tensor:
        """Attend as the cache does."""
        out = self._cache.attend(layer, *projected)
        self.found.append(out.float().cpu())
        return out


def attended(model: Model, cache: FullCache, rows: int) -> Tensor:
    """Return the attention `[layers, rows, heads, head_dim]` of a pass of so many rows, which is rolled back.

    Not the hidden rows: random weights make little of attention to many keys, so a wrong page would hardly show.
    """
    length, kept = cache.length, _Attended(cache)
    ids = torch.arange(1, rows + 1, device=model.device)
    model.forward(ids, kept)
    cache.truncate(length)
    return torch.stack(kept.found)


def attention_error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error of the worst layer."""
    return ((found - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)).max().item()


def resident_cache(model: Model, tokens: int, room: int = 64) -> FullCache:
    """Return a full cache on the device with `tokens` tokens of random keys and values."""
    cache = model.new_cache(tokens + room)
    for memory in (cache.store._keys, cache.store._values):
        memory.normal_(std=0.5)
    cache.length = tokens
    return cache


def filled_runner(model: Model, cache: FullCache) -> Runner:
    """Return a runner that takes the tokens in a filled cache for those of `prompt`."""
    runner = Runner(model, cache)
    runner._cached = prompt(cache.length)
    return runner


def prompt(tokens: int) -> list[int]:
    """Return the token ids of a filled cache."""
    return [1] * tokens


def run_rows(model: Model, cache: FullCache, rows: int) -> None:
    """Run a pass of so many rows and roll it back, so that every pass has the same length."""
    length = cache.length
    hidden = model.forward(torch.ones(rows, dtype=torch.long, device=model.device), cache)
    int(model.logits(hidden)[-1].argmax())
    cache.truncate(length)


def run_steps(runner: Runner, tokens: int, rows: int) -> None:
    """Run a pass of so many rows behind `tokens` tokens through a runner, which replays a CUDA graph if it has one."""
    sequence = TokenSequence([*prompt(tokens), 1])
    runner.truncate(tokens)
    hidden = runner.rows(sequence, [1] * (rows - 1))
    int(runner.model.logits(hidden)[-1].argmax())


def smaller(shape: ModelShape) -> ModelShape:
    """Return the shape with half as many layers."""
    return replace(shape, layers=shape.layers // 2)
