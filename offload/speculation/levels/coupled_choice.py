"""Plain decoding's choice with coupled sampling, and how much logits may change before it is another one."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from ...settings.config import Sampling
from ..sampling.noise import Noise
from ..sampling.warp import warp

_SMALLEST_MARGIN, _STEPS = 1e-7, 20  # of the search for a margin


@dataclass(frozen=True, slots=True)
class CoupledChoice:
    """Plain decoding's choice of the token at a position, from penalised logits `[vocab]`, and how narrow it is."""

    sampling: Sampling
    noise: Noise
    position: int

    def pick(self, logits: Tensor, sampling: Sampling | None = None) -> int:
        """Return the chosen token."""
        probs = warp(logits.unsqueeze(0), sampling or self.sampling)
        return int(self.noise.pick(probs, [self.position]))

    def margin(self, logits: Tensor, expected: int, emitted: int) -> float:
        """Return by how much a logit must differ for `emitted` to be chosen, not `expected`; inf if none is enough.

        Where top-p and min-p end may move with all logits at once.
        """
        low, high = _SMALLEST_MARGIN, float(logits.max() - logits[emitted]) + 100 * self.sampling.temperature
        if not (math.isfinite(high) and self._chooses(logits, high, expected, emitted)):
            return math.inf
        for _ in range(_STEPS):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self._chooses(logits, middle, expected, emitted) else (middle, high)
        return high

    def _chooses(self, logits: Tensor, change: float, expected: int, emitted: int) -> bool:
        for sampling in self._moved(change / self.sampling.temperature):
            for token, difference in ((emitted, change), (expected, -change)):
                changed = logits.clone()
                changed[token] += difference
                if self.pick(changed, sampling) == emitted:
                    return True
        return False

    def _moved(self, change: float) -> Iterator[Sampling]:
        """Yield the sampling, and with top-p and min-p as they would be if all log probabilities changed so much."""
        p, min_p = self.sampling.top_p, self.sampling.min_p
        yield self.sampling
        if p < 1 or min_p > 0:
            for signed in (-change, change):
                moved = p + p * (1 - p) * signed
                yield replace(
                    self.sampling, top_p=min(max(moved, 1e-6), 1.0), min_p=min(min_p * math.exp(min(signed, 50.0)), 1.0)
                )
