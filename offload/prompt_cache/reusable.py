"""The cached tokens whose KV has the same bits as in a fresh prefill. Only those may be saved.

With the native kernel these are all cached tokens. With torch, rounding depends on the chunk in which a token is run,
so a token qualifies only if everything before it was run in whole chunks. Where tokens attend to a selection that those
of a pass share, the cache knows which passes are those of a fresh prefill.
"""

from __future__ import annotations

import math
from typing import Protocol

from ..caches.protocol import DumpableCache
from ..speculation.passes.runner import Runner
from .fingerprint import TOKENS, rounds_by_row


class Reusable(Protocol):
    """Tracks how many leading tokens (`length`) of a runner's cache have the bits of a fresh prefill."""

    length: int

    @property
    def blocks(self) -> int:
        """Return how many blocks are restored together, so that the rest of the prefill begins at a pass's border."""
        ...

    def update(self) -> None:
        """Exclude tokens that were rolled back since the last `mark`."""

    def plan(self, tokens: int) -> None:
        """Set `length` to what it will be after the prefill of a prompt of `tokens` tokens."""

    def mark(self) -> None:
        """Remember the state after a prefill, whole or interrupted, for the next `update`."""


def reusable_prefix(runner: Runner) -> Reusable:
    """Return what tracks the reusable tokens of a runner's cache."""
    return WholePasses(runner) if runner.cache.passes > 1 else ReusablePrefix(runner)


class WholePasses(Reusable):
    """`Reusable` of a cache that runs a prompt in passes of a fixed number of tokens, as its runner begins at one."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._cache: DumpableCache = runner.cache
        self.length = 0

    @property
    def blocks(self) -> int:
        return math.lcm(self._cache.passes, TOKENS) // TOKENS

    def update(self) -> None:
        self.length = self._cache.restartable(self._runner.num_cached)

    def plan(self, tokens: int) -> None:
        passes = self._cache.passes
        self.length = tokens // passes * passes


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
