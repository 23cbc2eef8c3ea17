"""95 % intervals of mean scores, and of mean differences."""

from collections.abc import Sequence
from random import Random
from statistics import mean

_Z = 1.959964  # of the standard normal distribution: 95 % lie within
_RESAMPLES = 2000


def wilson(scores: Sequence[float]) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a mean score.

    For scores of 0 or 1 it is the usual one of a share; scores between them vary less, and it is then too wide.
    """
    count, share = len(scores), mean(scores)
    centre = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * (share * (1 - share) / count + (_Z / (2 * count)) ** 2) ** 0.5
    return max(centre - half, 0.0), min(centre + half, 1.0)


def bootstrap(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean of paired differences, by drawing the pairs again, with a fixed seed."""
    draw, count = Random(0), len(differences)
    means = sorted(sum(draw.choices(differences, k=count)) / count for _ in range(_RESAMPLES))
    return means[round(0.025 * (_RESAMPLES - 1))], means[round(0.975 * (_RESAMPLES - 1))]
