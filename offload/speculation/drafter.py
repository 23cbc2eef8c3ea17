"""What a level of speculation is fed with: drafts, and who makes them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..parallel import ALONE, Group
from ..sequence import TokenSequence
from .runner import Runner
from .sampling import Sampler, sample


class Draft(NamedTuple):
    """Proposed tokens, each following the one before, and the distributions they were drawn from.

    `rows` is `[tokens, vocab]`; None where every token was certain, a one-hot distribution.
    """

    tokens: list[int]
    rows: Tensor | None


NOTHING = Draft([], None)


class Drafter(Protocol):
    """Proposes what may come next. A level of speculation is one too."""

    name: str
    # What is taken for true until it has been measured:
    share: float  # of a plain step's time that one token takes
    prior: float  # acceptance rate

    def outlook(self, sequence: TokenSequence) -> Hashable:
        """What kind of draft would come now: drafts of a kind are about equally good. None: there would be none."""
        ...

    def propose(self, sequence: TokenSequence, limit: int) -> Draft:
        """Up to `limit` tokens that may follow the sequence, which is left as it was. All of them will be judged."""
        ...

    def observe(self, drafted: int, accepted: int) -> None:
        """What became of the last draft."""
        ...


class ModelDrafter:
    """A draft model that decodes plainly on a small cache. Its vocabulary is the target's, but for padding."""

    name = "draft"
    share = 0.2
    prior = 0.6

    def __init__(self, runner: Runner, sampler: Sampler, group: Group = ALONE) -> None:
        """Every rank of a `group` has all of the draft model; what rank 0 draws is what counts."""
        self._runner = runner
        self._sampler = sampler
        self._group = group

    def outlook(self, sequence: TokenSequence) -> Hashable:
        return True

    @torch.inference_mode()
    def propose(self, sequence: TokenSequence, limit: int) -> Draft:
        start = len(sequence)
        rows: list[Tensor] = []
        try:
            for _ in range(limit):
                logits = self._fitted(self._runner.model.logits(self._runner.rows(sequence)))
                rows.append(self._sampler.distribution(logits, sequence.tentative))
                sequence.extend([sample(rows[-1][0], self._sampler.generator)])
            return Draft([int(token) for token in self._group.agree(sequence.tokens[start:])], torch.cat(rows))
        finally:
            sequence.truncate(start)

    def _fitted(self, logits: Tensor) -> Tensor:
        """As many columns as the target has: some checkpoints pad the vocabulary, others do not."""
        missing = self._sampler.vocab - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def observe(self, drafted: int, accepted: int) -> None:
        self._runner.observe(drafted, accepted)
