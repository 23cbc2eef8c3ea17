"""Logits processors that depend on earlier tokens: repetition, frequency, presence, DRY and no-repeat n-gram.

Every row of a draft has its own history: the tokens observed so far and the draft's tokens before the row. A row is
processed as plain decoding would process it after the same history. Only the logits of penalised tokens are touched.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ...memory.host_memory import upload
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
    longest: np.ndarray = np.zeros(len(breakers), dtype=np.int32)  # by id: the n of its penalty
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


def repetition_penalty(logits: Tensor, penalty: float) -> Tensor:
    """Return the logits of tokens that occurred, lowered (CTRL, arXiv 1909.05858)."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)


class Penalties:
    """The penalties of one sequence, and the tokens that they depend on."""

    def __init__(self, sampling: Sampling, vocab: int, device: torch.device, breakers: Collection[int] = ()) -> None:
        """`breakers` are the ids of DRY's sequence breakers."""
        self._sampling = sampling
        self._device = device
        self._repetition = sampling.repetition_penalty != 1
        self._frequency = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
        repeats = sampling.dry_multiplier > 0 or sampling.no_repeat_ngram > 0
        self.active = self._repetition or self._frequency or repeats  # whether earlier tokens change any logit
        self._history = _History()
        self._seen: np.ndarray = np.zeros(vocab, dtype=bool)
        self._seen_ids: Tensor | None = None  # on the device; None if out of date
        self._counts: np.ndarray = np.zeros(vocab, dtype=np.float32)  # of generated tokens
        self._breakers: np.ndarray = np.zeros(vocab, dtype=bool)
        self._breakers[[token for token in breakers if token < vocab]] = True

    def observe(self, ids: Sequence[int], generated: bool = True) -> None:
        """Append tokens of the prompt, or generated ones, to the history."""
        if not self.active:
            return
        self._history.append(ids)
        self._seen_ids = None
        tokens = np.array(ids, dtype=np.int64)
        self._seen[tokens] = True
        if generated:
            np.add.at(self._counts, tokens, 1)

    def apply(self, logits: Tensor, drafts: Sequence[Sequence[int]]) -> Tensor:
        """Return penalised logits `[rows, vocab]`; each row follows the history and its own draft."""
        if not self.active:
            return logits
        logits = logits.clone()
        for values, before in zip(logits, drafts, strict=True):
            if self._repetition:
                self._penalise_seen(values, before)
            if self._frequency:
                self._penalise_counted(values, before)
            self._penalise_repeats(values, self._history.view(before))
        return logits

    def _penalise_seen(self, row: Tensor, draft: Sequence[int]) -> None:
        if self._seen_ids is None:
            self._seen_ids = self._tensor(np.flatnonzero(self._seen))
        new = [token for token in dict.fromkeys(draft) if not self._seen[token]]
        for ids in (self._seen_ids, self._tensor(np.array(new, dtype=np.int64))):
            row[ids] = repetition_penalty(row[ids], self._sampling.repetition_penalty)

    def _penalise_counted(self, row: Tensor, draft: Sequence[int]) -> None:
        counts = self._counts
        if draft:
            counts = counts.copy()
            np.add.at(counts, draft, 1)
        ids = np.flatnonzero(counts > 0)  # of booleans: ten times faster than of numbers
        penalties = self._sampling.frequency_penalty * counts[ids] + self._sampling.presence_penalty
        row[self._tensor(ids)] -= self._tensor(penalties)

    def _penalise_repeats(self, row: Tensor, tokens: np.ndarray) -> None:
        """Apply DRY and the n-gram ban to a row that follows `tokens`."""
        if self._sampling.dry_multiplier > 0:
            ids, penalties = dry_penalties(tokens, self._sampling, self._breakers)
            row[self._tensor(ids)] -= self._tensor(penalties.astype(np.float32))
        if self._sampling.no_repeat_ngram:
            completing: np.ndarray = completing_tokens(tokens, self._sampling.no_repeat_ngram).astype(np.int64)
            banned = row.index_fill(0, self._tensor(completing), float("-inf"))
            row.copy_(torch.where(banned.amax().isfinite(), banned, row))  # something must remain to be sampled

    def _tensor(self, array: np.ndarray) -> Tensor:
        return upload(torch.from_numpy(array), self._device)


class _History:
    """A growing array of token ids; a draft is written after its end without becoming a part of it."""

    def __init__(self) -> None:
        self._buffer: np.ndarray = np.zeros(1024, dtype=np.int32)
        self._length = 0

    def append(self, ids: Sequence[int]) -> None:
        """Append tokens."""
        self._length = len(self.view(ids))

    def view(self, draft: Sequence[int]) -> np.ndarray:
        """Return the history and a draft, until the next call."""
        end = self._length + len(draft)
        if end > len(self._buffer):
            self._buffer = np.concatenate((self._buffer[: self._length], np.zeros(end + 1024, dtype=np.int32)))
        self._buffer[self._length : end] = draft
        return self._buffer[:end]
