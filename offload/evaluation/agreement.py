"""How far a run agrees with another one of the same text."""

from __future__ import annotations

from collections.abc import Sequence

from .teacher_forcing import TextScores


def top1_agreement(reference: TextScores, other: TextScores) -> float:
    """Return the share of positions at which both find the same token likeliest, given the same tokens before."""
    return float((reference.choices == other.choices).double().mean())


def mean_divergence(other: TextScores) -> float | None:
    """Return the mean KL divergence from the reference in nats; None if there was none. Rounding may make it 0."""
    return None if other.divergences is None else max(float(other.divergences.double().mean()), 0.0)


def equal_tokens(reference: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two outputs share until the first difference."""
    pairs = enumerate(zip(reference, other, strict=False))
    return next((index for index, (one, two) in pairs if one != two), min(len(reference), len(other)))
