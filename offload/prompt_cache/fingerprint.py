"""Hashes over everything that the KV depends on: weights, arithmetic, file format, and the tokens up to a position.

And the cached tokens whose KV has the same bits as in a fresh prefill (`Reusable`): only those may be saved. With the
native kernel these are all cached tokens. With torch, rounding depends on the chunk in which a token is run, so a token
qualifies only if everything before it was run in whole chunks. Where tokens attend to a selection that those of a pass
share, the cache knows which passes are those of a fresh prefill.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Protocol

from ..architecture.layer_spec import LayerSpec
from ..settings.kv_formats import BF16, saved_format

if TYPE_CHECKING:
    from ..architecture.config import ModelShape
    from ..caches.protocol import DumpableCache, TargetCache
    from ..kernels.native import Kernel
    from ..model.decoder import Model
    from ..speculation.passes.runner import Runner


TOKENS = 128  # per block; a shared prefix is reused in whole blocks, which are whole windows of quantised ones
LEAST = 2000  # tokens; shorter prompts are not saved
VERSION = 4  # of the file format and of the arithmetic
# Fields of the shape that do not change the KV. RoPE is hashed by its angles, not by its settings.
_IGNORED = ("rope", "max_positions", "rope_divisors", "eos_ids", "context", "vocab", "dual_chunk", "logit_scale")
_SPEC_FACTS = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm")  # of a spec; hashed as they were before there were others


def fingerprint(model: Model, cache: TargetCache, chunk: int, weights: str) -> str:
    """Return a hash of all but the tokens: weights, shape, RoPE, dtype, kernel or torch version, and formats.

    The formats are those of files and of keys and values. Where tokens attend to a selection, its sizes are among them.

    The kernel is part of it because kernels round differently, and torch also rounds differently for other page and
    chunk sizes: the prompt cache must not change the output.
    """
    shape = _shape_facts(model.shape)
    kernel = model.operations.kernel
    backend = ("torch", _version("torch"), _gpu_name(model)) if kernel is None else (kernel.level, _version("triforce"))
    if kernel is not None and not model.shape.is_native:  # torch computes what the kernel has not
        backend += ("torch", _version("torch"))
    sizes = (_page_tokens(cache, kernel), 0 if rounds_by_row(model) else chunk)
    device = (str(model.dtype), model.device.type, model.group.size)
    format = () if (kv := saved_format(model.kv)) == BF16 else (kv,)
    facts = repr((VERSION, TOKENS, weights, shape, device, backend, sizes, *format))
    return hashlib.sha256(facts.encode() + cache.rope.identity()).hexdigest()


def _shape_facts(shape: ModelShape) -> list[tuple[str, object]]:
    """Return names and values of all fields that change the KV; of a spec those that are not as in Llama's layers."""
    usual = {field.name: field.default for field in fields(shape) if field.default is not MISSING}
    names = {field.name for field in fields(shape)}.difference((*_IGNORED, "specs"))
    facts = {name: getattr(shape, name) for name in names}
    spec = shape.specs[0]
    facts = {name: value for name, value in facts.items() if name not in usual or value != usual[name]}
    facts |= {name: getattr(spec, name) for name in _SPEC_FACTS} | {"qk_norm": bool(spec.qk_norm)}
    if shape.specs != (LayerSpec(**{name: getattr(spec, name) for name in _SPEC_FACTS}),):
        facts["specs"] = shape.specs
    if shape.query_scaling is not None:
        facts["query_scaling"] = shape.query_scaling
    return sorted(facts.items())


def _page_tokens(cache: TargetCache, kernel: Kernel | None) -> int:
    """Return the cache's page size in tokens where it changes rounding, else 0.

    It does not for the native kernel on pages of whole PIECEs.
    """
    from ..kernels.native.structs import PIECE

    page = cache.store.page_tokens
    return 0 if kernel is not None and page % PIECE == 0 else page


def rounds_by_row(model: Model) -> bool:
    """Return whether a token's KV does not depend on the tokens that are run in the same pass.

    True for the native kernel with at most two ranks: the sum of two ranks does not depend on their order.
    """
    return model.operations.kernel is not None and model.group.size <= 2


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its sources
        return ""


def _gpu_name(model: Model) -> str:
    """Return the GPU's name, "" on the CPU."""
    import torch

    return torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else ""


def name_of_all(names: Sequence[str]) -> str:
    """Combine the fingerprints of the ranks that share a model."""
    return hashlib.sha256(" ".join(names).encode()).hexdigest()


def chain(fingerprint: str, ids: Sequence[int]) -> Iterator[str]:
    """Yield the keys of a prompt's whole blocks; each is a hash over all tokens up to the block's end."""
    key = fingerprint
    for start in range(0, len(ids) - TOKENS + 1, TOKENS):
        key = hashlib.sha256(f"{key} {list(ids[start : start + TOKENS])}".encode()).hexdigest()
        yield key


class Reusable(Protocol):
    """Tracks how many leading tokens (`length`) of a runner's cache have the bits of a fresh prefill."""

    length: int

    @property
    def blocks(self) -> int:
        """Return how many blocks are restored together, so that the rest of the prefill begins at a pass's border."""

    def update(self) -> None:
        """Exclude tokens that were rolled back since the last `mark`."""

    def plan(self, tokens: int) -> None:
        """Set `length` to what it will be after the prefill of a prompt of `tokens` tokens."""

    def mark(self) -> None:
        """Remember the state after a prefill, whole or interrupted, for the next `update`."""


def reusable_prefix(runner: Runner) -> Reusable:
    """Return what tracks the reusable tokens of a runner's cache."""
    return ReusablePrefix(runner)


class ReusablePrefix(Reusable):
    """`Reusable` of a FullCache."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._cache: DumpableCache = runner.cache
        self._chunk = 1 if rounds_by_row(runner.model) else runner.chunk
        self.length = 0

    @property
    def blocks(self) -> int:
        return math.lcm(self._chunk, TOKENS) // TOKENS

    def update(self) -> None:
        cache = self._cache
        unchanged = cache.marks.update(self, cache.length)
        self.length = (
            self._runner.num_cached if self._chunk == 1 else min(self.length, unchanged, self._runner.num_cached)
        )
        if cache.windows is not None and not cache.continues(self.length // TOKENS * TOKENS):
            self.length = 0

    def plan(self, tokens: int) -> None:
        start = min(self._runner.num_cached, tokens - 1)
        whole = start <= self.length and start % self._chunk == 0
        self.length = tokens // self._chunk * self._chunk if whole else min(self.length, start)

    def mark(self) -> None:
        self._cache.marks.update(self, self._cache.length)
