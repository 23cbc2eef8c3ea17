"""Hashes over everything that the KV depends on: weights, arithmetic, file format, and the tokens up to a position.

And the cached tokens whose KV has the same bits as in a fresh prefill (`Reusable`): only those may be saved. With the
native kernel these are all cached tokens. With torch, rounding depends on the chunk in which a token is run, so a token
qualifies only if everything before it was run in whole chunks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, cast

from ..settings.kv_formats import saved_format

if TYPE_CHECKING:
    from ..caches.full import FullCache
    from ..kernels.native import Kernel
    from ..model.decoder import Model
    from ..speculation.passes.runner import Runner


TOKENS = 128  # per block; a shared prefix is reused in whole blocks, which are whole windows of quantised ones
LEAST = 500  # tokens; shorter prompts are not saved
VERSION = 6  # of the file format and of the arithmetic
# Fields of the shape that do not change the KV. RoPE is hashed by its angles, not by its settings.
_IGNORED = ("rope", "max_positions", "rope_divisors", "eos_ids", "context", "vocab", "logit_scale")


def fingerprint(model: Model, cache: FullCache, chunk: int, weights: str) -> str:
    """Return a hash of all but the tokens: weights, shape, RoPE, dtype, kernel or torch version, and formats.

    The formats are those of files and of keys and values.

    The kernel is part of it because kernels round differently, and torch also rounds differently for other page and
    chunk sizes: the prompt cache must not change the output.
    """
    shape, kernel = model.shape, model.operations.kernel
    own = {fact.name: getattr(shape, fact.name) for fact in fields(shape) if fact.name not in _IGNORED}
    torch_name = ("torch", _version("torch"), _gpu_name(model))
    backend: tuple[str, ...] = torch_name if kernel is None else (kernel.level, _version("triforce"))
    if kernel is not None and not shape.is_native:  # torch computes what the kernel has not
        backend += torch_name
    sizes = (_page_tokens(cache, kernel), 0 if rounds_by_row(model) else chunk)
    device = (str(model.dtype), model.device.type, model.group.size)
    facts = (VERSION, weights, own, shape.query_scaling, device, backend, sizes, saved_format(model.kv))
    return hashlib.sha256(repr(facts).encode() + cache.rope.identity()).hexdigest()


def _page_tokens(cache: FullCache, kernel: Kernel | None) -> int:
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


class Reusable:
    """Tracks how many leading tokens (`length`) of a runner's dumpable `cache` have the bits of a fresh prefill."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.cache = cast("FullCache", runner.cache)
        self._chunk = 1 if rounds_by_row(runner.model) else runner.chunk
        self.length = 0

    @property
    def blocks(self) -> int:
        """Return how many blocks are restored together, so that the rest of the prefill begins at a pass's border."""
        return math.lcm(self._chunk, TOKENS) // TOKENS

    def update(self) -> None:
        """Exclude tokens that were rolled back since the last `mark`."""
        cache = self.cache
        unchanged = cache.marks.update(self, cache.length)
        cached = self._runner.num_cached
        self.length = cached if self._chunk == 1 else min(self.length, unchanged, cached)
        if cache.windows is not None and not cache.continues(self.length // TOKENS * TOKENS):
            self.length = 0

    def plan(self, tokens: int) -> None:
        """Set `length` to what it will be after the prefill of a prompt of `tokens` tokens."""
        start = min(self._runner.num_cached, tokens - 1)
        whole = start <= self.length and start % self._chunk == 0
        self.length = tokens // self._chunk * self._chunk if whole else min(self.length, start)

    def mark(self) -> None:
        """Remember the state after a prefill, whole or interrupted, for the next `update`."""
        self.cache.marks.update(self, self.cache.length)
