"""Repetitions at the end of a text: DRY's penalties, and the tokens that would complete an n-gram again."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...settings.config import Sampling

LARGEST_DRY = 1e4  # no logits of a model differ by as much


def repeats(tokens: np.ndarray, length: int, breakers: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """Yield for n = 1, 2, ... up to `length` the positions after earlier occurrences of the last n `tokens`.

    Ends before the first n that has no earlier occurrence, or whose n tokens include a sequence breaker.

    Args:
        tokens: `[tokens]` ids.
        breakers: bool `[vocab]`, or None.
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1:])  # a vectorised scan needs no index that a draft would change
    for n in range(1, min(length, len(tokens) - 1) + 1):
        last = tokens[-n]
        if breakers is not None and breakers[last]:
            return
        ends = ends[ends >= n - 1]
        ends = ends[tokens[ends - (n - 1)] == last]
        if not len(ends):
            return
        yield ends + 1


def dry_penalties(tokens: np.ndarray, sampling: Sampling, breakers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids that DRY penalises after `tokens`, and the penalties to subtract from their logits.

    If the last n tokens occur earlier, a token that follows them there is penalised by multiplier * base ** (n -
    allowed length), for the largest such n of at least the allowed length. The n tokens contain no sequence breaker,
    and breakers are not penalised. So in llama.cpp and text-generation-webui. A penalty is at most `LARGEST_DRY`.
    """
    tokens = tokens[-sampling.dry_range :] if sampling.dry_range else tokens
    allowed = sampling.dry_allowed_length
    longest = np.zeros(len(breakers), dtype=np.int32)  # by id: the n of its penalty
    for n, positions in enumerate(repeats(tokens, _longest_match(sampling), breakers), 1):
        if n >= allowed:
            longest[tokens[positions]] = n
    ids = np.flatnonzero(longest > 0)
    ids = ids[~breakers[ids]]
    # In float64, which holds any allowed length; the growth of a match is limited by `_longest_match`.
    penalties = sampling.dry_multiplier * sampling.dry_base ** (longest[ids].astype(np.float64) - allowed)
    return ids, np.minimum(penalties, LARGEST_DRY)


def _longest_match(sampling: Sampling) -> int:
    """Return the match length from which on the penalty of DRY is constant."""
    if sampling.dry_base == 1:
        return sampling.dry_allowed_length
    growth = (math.log(LARGEST_DRY) - math.log(sampling.dry_multiplier)) / math.log(sampling.dry_base)
    return sampling.dry_allowed_length + math.ceil(growth)


def completing_tokens(tokens: np.ndarray, size: int) -> np.ndarray:
    """Return the ids that would complete an n-gram of `size` tokens that occurs in `tokens`; ids may repeat."""
    if size == 1:
        return tokens
    for n, positions in enumerate(repeats(tokens, size - 1), 1):
        if n == size - 1:
            return tokens[positions]
    return tokens[:0]
