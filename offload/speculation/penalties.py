"""Logits processors that depend on earlier tokens: repetition, frequency, presence, DRY and no-repeat n-gram.

Every row of a draft has its own history: the tokens observed so far and the draft's tokens before the row. A row is
processed as plain decoding would process it after the same history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..config import Sampling

LARGEST_DRY = 1e4  # no logits of a model differ by as much


def repetition_penalty(logits: Tensor, penalty: float, seen: Tensor) -> Tensor:
    """Return logits `[..., vocab]` with those of `seen` tokens (bool, broadcast) lowered (arXiv 1909.05858)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


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
    longest = np.zeros(len(breakers), dtype=np.int64)  # by id: the n of its penalty
    for n, positions in enumerate(repeats(tokens, _longest_match(sampling), breakers), 1):
        if n >= allowed:
            longest[tokens[positions]] = n
    ids = np.flatnonzero((longest > 0) & ~breakers)
    penalties = sampling.dry_multiplier * sampling.dry_base ** (longest[ids] - allowed).astype(np.float64)
    return ids, np.minimum(penalties, LARGEST_DRY)


def _longest_match(sampling: Sampling) -> int:
    """Return the match length from which on the penalty of DRY is constant."""
    if sampling.dry_base == 1:
        return sampling.dry_allowed_length
    growth = math.log(LARGEST_DRY / sampling.dry_multiplier) / math.log(sampling.dry_base)
    return sampling.dry_allowed_length + math.ceil(growth)


def completing_tokens(tokens: np.ndarray, size: int) -> np.ndarray:
    """Return the ids that would complete an n-gram of `size` tokens that occurs in `tokens`; ids may repeat."""
    if size == 1:
        return tokens
    for n, positions in enumerate(repeats(tokens, size - 1), 1):
        if n == size - 1:
            return tokens[positions]
    return tokens[:0]


class _History:
    """A growing array of token ids; a draft is written after its end without becoming a part of it."""

    def __init__(self) -> None:
        self._buffer = np.zeros(1024, dtype=np.int32)
        self._length = 0

    def append(self, ids: Sequence[int]) -> None:
        self.view(ids, len(ids))
        self._length += len(ids)

    def view(self, draft: Sequence[int], count: int) -> np.ndarray:
        """Return the history and the first `count` tokens of a draft, until the next call."""
        end = self._length + count
        if end > len(self._buffer):
            self._buffer = np.concatenate((self._buffer[: self._length], np.zeros(end, dtype=np.int32)))
        self._buffer[self._length : end] = draft[:count]
        return self._buffer[:end]


class Penalties:
    """The penalties of one sequence, and the tokens that they depend on."""

    def __init__(self, sampling: Sampling, vocab: int, device: torch.device, breakers: Collection[int] = ()) -> None:
        """`breakers` are the ids of DRY's sequence breakers. Only the state that `sampling` needs is kept."""
        self._sampling = sampling
        counts = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
        self._seen = torch.zeros(vocab, dtype=torch.bool, device=device) if sampling.repetition_penalty != 1 else None
        self._counts = torch.zeros(vocab, device=device) if counts else None  # of generated tokens
        self._history = _History() if sampling.dry_multiplier > 0 or sampling.no_repeat_ngram else None
        self._breakers = np.zeros(vocab, dtype=bool)
        self._breakers[[token for token in breakers if token < vocab]] = True

    def observe(self, ids: Sequence[int], generated: bool = True) -> None:
        """Append tokens of the prompt, or generated ones, to the history."""
        if self._seen is not None:
            _mark(self._seen, ids)
        if self._counts is not None and generated:
            _count(self._counts, ids)
        if self._history is not None:
            self._history.append(ids)

    def apply(self, logits: Tensor, draft: Sequence[int] = ()) -> Tensor:
        """Return penalised logits `[rows, vocab]`.

        The last row follows the history and all of the `draft`; each row before it follows one token less.
        """
        sampling = self._sampling
        drafts = [draft[: max(len(draft) - before, 0)] for before in reversed(range(len(logits)))]
        if self._seen is not None:
            logits = repetition_penalty(logits, sampling.repetition_penalty, _rows(self._seen, drafts, _mark))
        if self._counts is not None:
            counts = _rows(self._counts, drafts, _count)
            logits = logits - (sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0))
        if self._history is None:
            return logits
        views = (self._history.view(each, len(each)) for each in drafts)
        return torch.stack([self._without_repeats(row, tokens) for row, tokens in zip(logits, views, strict=True)])

    def _without_repeats(self, row: Tensor, tokens: np.ndarray) -> Tensor:
        """Return logits `[vocab]` after DRY and the n-gram ban, for a row that follows `tokens`."""
        if self._sampling.dry_multiplier > 0:
            ids, penalties = dry_penalties(tokens, self._sampling, self._breakers)
            penalties = torch.from_numpy(penalties).to(row.device, row.dtype)
            row = row.index_add(0, torch.from_numpy(ids).to(row.device), penalties, alpha=-1)
        if self._sampling.no_repeat_ngram:
            ids = completing_tokens(tokens, self._sampling.no_repeat_ngram).astype(np.int64)
            banned = row.index_fill(0, torch.from_numpy(ids).to(row.device), float("-inf"))
            row = banned if torch.isfinite(banned.amax()) else row  # something must remain to be sampled
        return row


def _rows(state: Tensor, drafts: Sequence[Sequence[int]], update: Callable[[Tensor, Sequence[int]], None]) -> Tensor:
    """Return the state `[vocab]` after each of the drafts, `[rows, vocab]`."""
    if not drafts[-1]:
        return state
    rows = state.repeat(len(drafts), 1)
    for row, draft in zip(rows, drafts, strict=True):
        update(row, draft)
    return rows


def _mark(seen: Tensor, ids: Sequence[int]) -> None:
    seen[torch.tensor(ids, dtype=torch.long, device=seen.device)] = True


def _count(counts: Tensor, ids: Sequence[int]) -> None:
    index = torch.tensor(ids, dtype=torch.long, device=counts.device)
    counts.index_add_(0, index, torch.ones(len(ids), device=counts.device))
