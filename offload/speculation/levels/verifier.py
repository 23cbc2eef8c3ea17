"""The verifier of a level: the model that its drafts are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...sequence import TokenSequence
from ..passes.runner import Runner
from ..sampling.logprobs import LogprobsRecorder
from ..sampling.warp import Sampler
from ..trees.tree import paths


class Verifier:
    """The target on one of its caches."""

    def __init__(self, name: str, runner: Runner, sampler: Sampler, logprobs: LogprobsRecorder | None = None) -> None:
        """With `logprobs`, the log-probabilities of what its level emits are recorded there."""
        self.name = name
        self.runner = runner
        self._sampler = sampler
        self._logprobs = logprobs
        self._logits: Tensor | None = None  # of the last score, if log-probabilities are recorded

    def score(self, sequence: TokenSequence, draft: list[int], parents: Sequence[int] | None = None) -> Tensor:
        """Return the distributions after the sequence and after each token of the draft: `[len(draft) + 1, vocab]`.

        With the `parents` of a tree, those after a token follow the tokens on its path.
        """
        if parents is not None:
            return self._score_tree(sequence, draft, parents)
        logits = self._scored(self.runner.rows(sequence, draft))
        return self._sampler.distribution(logits, [*sequence.tentative, *draft])

    def _score_tree(self, sequence: TokenSequence, draft: list[int], parents: Sequence[int]) -> Tensor:
        logits = self._scored(self.runner.tree_rows(sequence, draft, parents))
        needs_paths = self._sampler.reads_history
        return self._sampler.distribution(
            logits, paths=paths(sequence.tentative, draft, parents) if needs_paths else None
        )

    def _scored(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden rows, and keep them until tokens are emitted if those are to be recorded."""
        logits = self.runner.logits(hidden)
        self._logits = logits if self._logprobs is not None else None
        return logits

    def emit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Note which tokens the level emits after the last score, and from which of its rows each was chosen."""
        if self._logprobs is not None:
            logits, self._logits = self._logits, None
            self._logprobs.record(logits[list(rows)], tokens)
