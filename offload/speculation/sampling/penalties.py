"""Logits processors that depend on earlier tokens: repetition, frequency, presence, DRY and no-repeat n-gram.

Every row of a draft has its own history: the tokens observed so far and the draft's tokens before the row. A row is
processed as plain decoding would process it after the same history. Only the logits of penalised tokens are touched.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from ...settings.config import Sampling
from .repeats import completing_tokens, dry_penalties
from .transfers import upload


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
        self._seen = np.zeros(vocab, dtype=bool)
        self._seen_ids: Tensor | None = None  # on the device; None if out of date
        self._counts = np.zeros(vocab, dtype=np.float32)  # of generated tokens
        self._breakers = np.zeros(vocab, dtype=bool)
        self._breakers[[token for token in breakers if token < vocab]] = True

    def observe(self, ids: Sequence[int], generated: bool = True) -> None:
        """Append tokens of the prompt, or generated ones, to the history."""
        if not self.active:
            return
        ids = np.array(ids, dtype=np.int64)
        self._history.append(ids)
        self._seen[ids] = True
        self._seen_ids = None
        if generated:
            np.add.at(self._counts, ids, 1)

    def apply(self, logits: Tensor, draft: Sequence[int] = (), drafts: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Return penalised logits `[rows, vocab]`.

        The last row follows the history and all of the `draft`; each row before it follows one token less. With
        `drafts`, each row follows the history and its own draft.
        """
        if not self.active:
            return logits
        logits = logits.clone()
        for row, values in enumerate(logits):
            before = draft[: max(len(draft) - (len(logits) - 1 - row), 0)] if drafts is None else drafts[row]
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
            ids = self._tensor(completing_tokens(tokens, self._sampling.no_repeat_ngram).astype(np.int64))
            banned = row.index_fill(0, ids, float("-inf"))
            row.copy_(torch.where(banned.amax().isfinite(), banned, row))  # something must remain to be sampled

    def _tensor(self, array: np.ndarray) -> Tensor:
        return upload(torch.from_numpy(array), self._device)


class _History:
    """A growing array of token ids; a draft is written after its end without becoming a part of it."""

    def __init__(self) -> None:
        self._buffer = np.zeros(1024, dtype=np.int32)
        self._length = 0

    def append(self, ids: Sequence[int]) -> None:
        self._length = len(self.view(ids))

    def view(self, draft: Sequence[int]) -> np.ndarray:
        """Return the history and a draft, until the next call."""
        end = self._length + len(draft)
        if end > len(self._buffer):
            self._buffer = np.concatenate((self._buffer[: self._length], np.zeros(end, dtype=np.int32)))
        self._buffer[self._length : end] = draft
        return self._buffer[:end]
