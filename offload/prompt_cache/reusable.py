"""Which of the tokens that a runner holds are, bit for bit, as a fresh run computes them: only those may be saved.

With the native kernel all are. With torch, rows round as the chunk does in which they are run, so what counts must have
been run in whole chunks from the beginning on.
"""

from __future__ import annotations

import math

from ..speculation.runner import Runner
from .fingerprint import TOKENS, rounds_by_row


class ReusablePrefix:
    """Follows a runner on a FullCache from prompt to prompt: its first `length` tokens are as in a fresh run."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._chunk = 1 if rounds_by_row(runner.model) else runner.chunk
        self.length = 0

    @property
    def blocks(self) -> int:
        """Blocks that are taken over together, so that the rest begins where a chunk does."""
        return math.lcm(self._chunk, TOKENS) // TOKENS

    def look(self) -> None:
        """What others have rolled back since the last `note` is not as it was."""
        cache = self._runner.cache
        unchanged = cache.marks.update(self, cache.length)
        self.length = (
            self._runner.num_cached if self._chunk == 1 else min(self.length, unchanged, self._runner.num_cached)
        )

    def expect(self, tokens: int) -> None:
        """A prompt of so many tokens will be run, behind what is held of it."""
        start = min(self._runner.num_cached, tokens - 1)
        whole = start <= self.length and start % self._chunk == 0
        self.length = tokens // self._chunk * self._chunk if whole else min(self.length, start)

    def note(self) -> None:
        """The prompt has been run, or what there was time for."""
        cache = self._runner.cache
        cache.marks.update(self, cache.length)
