"""Coupled sampling: drafts and their verification use the same noise, so the target's choice does not depend on drafts.

The token at a position is the one that the noise picks from the target's distribution, whatever was drafted; a drafted
token is accepted if it is that one (Daliri et al., arXiv 2408.07978). Nothing need be known of the drafter's
distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ...settings.config import Sampling
from ..sampling.noise import Noise
from ..sampling.warp import warp
from .tree import Verdict

_SMALLEST_MARGIN, _STEPS = 1e-7, 20  # of the search for a margin


def verify_coupled(drafted: Sequence[int], picks: Sequence[int], parents: Sequence[int] | None = None) -> Verdict:
    """Return what the target's choices accept of a draft, and the token that follows.

    Args:
        drafted: the tokens of the draft.
        picks: the tokens that the noise picks from the target's rows: after the sequence, and after each node, each
            with the noise of the position that follows.
        parents: the index of each node's parent, before the node's own; -1 is the sequence's end. None is a chain.
            Siblings' tokens differ.
    """
    parents = range(-1, len(drafted) - 1) if parents is None else parents
    path, node = [], -1
    for index, (token, parent) in enumerate(zip(drafted, parents, strict=True)):
        if parent == node and token == picks[node + 1]:
            path.append(index)
            node = index
    return Verdict(path, picks[node + 1])


def draw_children_coupled(rows: Tensor, noise: Noise, position: int, count: int) -> Tensor:
    """Draw different tokens for one position from distributions `[nodes, vocab]`, on the device: `[nodes, count]`.

    The first is what `noise.pick` returns; the others are the likeliest to be what it picks from the target's.
    """
    return noise.best(rows, [position] * len(rows), count)


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

    def perturbed(self, logits: Tensor) -> Tensor:
        """Return the logits with Gumbel noise, up to a constant; -inf where top-k, top-p or min-p keep no token."""
        scores = self.noise.scores(warp(logits.unsqueeze(0), self.sampling), [self.position])[0]
        return scores.log() * self.sampling.temperature

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
                    self.sampling,
                    top_p=min(max(moved, 1e-6), 1.0),
                    min_p=min(min_p * math.exp(min(signed, 50.0)), 1.0),
                )
