"""What the tokens of a draft are drawn from: logits of a pass for each of them."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ...model.heads import Head
from ...sequence import TokenSequence
from ..passes.runner import Runner
from ..sampling.warp import Sampler


class DraftPasses:
    """A pass for each token of a chain, or for each depth of a tree.

    Logits have a column for each of the target's tokens: some checkpoints pad the vocabulary, others do not. A head
    that knows few of them has columns for these alone, where nothing else is asked of them: what is drawn is then
    mapped by `ids`, and what it was drawn from by `spread`.
    """

    def __init__(self, runner: Runner, sampler: Sampler) -> None:
        self._runner, self._vocab = runner, sampler.vocab
        is_free = sampler.noise is None and not sampler.reads_history
        self.targets: Tensor | None = getattr(runner.model, "targets", None) if is_free else None

    def ids(self, columns: Tensor) -> Tensor:
        """Return the target's ids of columns of the logits."""
        return columns if self.targets is None else self.targets[columns]

    def spread(self, rows: Tensor) -> Tensor:
        """Return distributions `[rows, vocab]` of those over the columns of the logits."""
        if self.targets is None:
            return rows
        return rows.new_zeros((len(rows), self._vocab)).index_copy_(1, self.targets, rows)

    def first(self, sequence: TokenSequence, depth: int) -> Tensor:
        """Begin a draft of up to `depth` tokens; return the logits `[1, columns]` behind the sequence."""
        return self._logits(self._runner.rows(sequence))

    def following(self, ids: Tensor) -> Tensor:
        """Return the logits `[1, columns]` behind the next token of a chain, `[1]` on the device."""
        return self._logits(self._runner.forward(self._known(ids)))

    def following_nodes(self, ids: Tensor, parents: Sequence[int]) -> Tensor:
        """Return the logits `[nodes, columns]` behind the nodes at the next depth that have children.

        `ids` `[nodes]` are on the device, `parents` as of `Runner.forward`.
        """
        return self._logits(self._runner.forward(self._known(ids), parents))

    def resolve(self, ids: Sequence[int]) -> None:
        """Note the ids of the tokens of a chain, or of the nodes of a tree in order, that had logits behind them."""
        self._runner.resolve(ids)

    def _known(self, ids: Tensor) -> Tensor:
        """Return ids with those that only the target has, as a constraint may ask for, replaced by the last one."""
        return ids.clamp(max=self._runner.model.shape.vocab - 1)

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.targets is not None:
            return cast("Head", self._runner.model).own_logits(hidden)
        logits = self._runner.logits(hidden)
        missing = self._vocab - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits
