"""Drafts with a model: a draft model, the target on selected chunks, or a trained head."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ...architecture.head_shape import published_acceptance
from ...memory.host_memory import download, upload
from ...model.heads import Head
from ...parallel import ALONE, Group
from ...sequence import TokenSequence
from ...settings.tree_settings import TreeSampling
from ..passes.head_runner import HeadRunner
from ..passes.runner import Runner
from ..sampling.warp import Sampler, read_tokens
from ..trees.tree import Draft, DraftedTree, chain
from ..trees.verification import draw_children
from .draft_steps import DraftStep, draft_steps
from .drafter import LONGEST_DRAFT


class ModelDrafter:
    """Drafts a token for each pass of a chain, or the nodes at each depth of a tree.

    The tokens of a draft stay on the device until its end, and come to the host by one copy. Penalties and constraints
    need them on the host at once, with a copy for each pass.
    """

    branches = True
    longest = LONGEST_DRAFT

    def __init__(
        self,
        runner: Runner | HeadRunner,
        sampler: Sampler,
        group: Group = ALONE,
        name: str = "draft",
        acceptance: float = 0.6,
    ) -> None:
        """Every rank of a `group` runs the whole model; the tokens that rank 0 draws are used by all.

        `acceptance` is the prior of drafts, until it is measured.
        """
        self.name, self._acceptance = name, acceptance
        self._runner, self._sampler, self._group = runner, sampler, group
        self._model = runner.model
        # A head that knows few of the target's tokens draws from these alone, where no history changes the logits.
        is_free = sampler.noise is None and not sampler.reads_history
        self._targets = self._model.targets if is_free and isinstance(self._model, Head) else None

    @property
    def relative_cost(self) -> float:
        return self._runner.relative_cost

    @property
    def setups(self) -> int:
        return self._runner.setups

    def setup_cost(self, sequence: TokenSequence) -> float:
        return self._runner.setup_cost(sequence)

    def observe(self, drafted: int, accepted: int) -> None:
        self._runner.observe(drafted, accepted)

    def draft_kind(self, sequence: TokenSequence) -> Hashable:
        return True

    def prior(self, kind: Hashable) -> float:
        return self._acceptance

    @torch.inference_mode()
    def propose(self, sequence: TokenSequence, limit: int, tree: DraftedTree | None = None) -> Draft:
        shape = None if tree is None else tree.within(limit)
        steps = draft_steps(chain(limit) if shape is None else shape.parents, self._model.device)
        tokens: list[Tensor] = []
        rows: list[Tensor] = []
        paths = [sequence.tentative]
        logits = self._logits(self._runner.rows(sequence))
        for position, step in enumerate(steps, len(sequence)):
            rows.append(self._rows(logits, shape, paths))
            drawn = self._draw(rows[-1], step.most, shape, position).flatten()
            tokens.append(self._agreed(self._ids(drawn if step.drawn_index is None else drawn[step.drawn_index])))
            if step.run:
                ids = tokens[-1] if step.run_index is None else tokens[-1][step.run_index]
                # A constraint may ask for tokens that only the target has: the last one stands for them.
                ids = ids.clamp(max=self._model.shape.vocab - 1)
                logits = self._logits(self._runner.forward(ids, None if shape is None else step.parents))
                if self._sampler.reads_history:
                    paths = _paths(paths, step, download(tokens[-1]))
        return self._draft(shape, steps, tokens, rows)

    def _ranks(self, shape: DraftedTree | None) -> bool:
        """Return whether children are the likeliest tokens, as at temperature 0: its distributions name only one."""
        if shape is None:
            return False
        return self._sampler.sampling.greedy or (shape.sampling is TreeSampling.TOP_K and self._sampler.noise is None)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[rows, columns]`: a column for each of the target's tokens, or of those that a head knows.

        Some checkpoints pad the vocabulary, others do not.
        """
        if self._targets is not None and isinstance(self._model, Head):
            return self._model.own_logits(hidden)
        logits = self._runner.logits(hidden)
        missing = self._sampler.vocab - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def _rows(self, logits: Tensor, shape: DraftedTree | None, paths: Sequence[Sequence[int]]) -> Tensor:
        """Return the distributions that children are drawn from, or the logits that rank them."""
        own = paths if self._sampler.reads_history else None
        if self._ranks(shape):
            return self._sampler.penalised(logits, own)
        return self._sampler.distribution(logits, paths=own)

    def _draw(self, rows: Tensor, count: int, shape: DraftedTree | None, position: int) -> Tensor:
        """Return children of nodes `[nodes, count]`, for a position of the sequence; for a chain `[1]`."""
        sampler = self._sampler
        if shape is None:
            return sampler.draw(rows[0], position)
        if self._ranks(shape):
            return draw_children(rows, count, sampler.generator, TreeSampling.TOP_K)
        if sampler.noise is not None:  # the first is the pick; the others are the likeliest picks of the target
            return sampler.noise.best(rows, [position] * len(rows), count)
        return draw_children(rows, count, sampler.generator, shape.sampling)

    def _ids(self, columns: Tensor) -> Tensor:
        """Return the target's ids of columns of the logits."""
        return columns if self._targets is None else self._targets[columns]

    def _agreed(self, tokens: Tensor) -> Tensor:
        """Return the tokens of rank 0, if the ranks share this model: all shares must run the same."""
        if self._model.group.size == 1:
            return tokens
        agreed = self._model.group.agree(download(tokens))
        return upload(torch.tensor([int(token) for token in agreed]), tokens.device)

    def _draft(
        self, shape: DraftedTree | None, steps: Sequence[DraftStep], tokens: list[Tensor], rows: list[Tensor]
    ) -> Draft:
        """Read the tokens, by one copy, and return them in the tree's order."""
        ranks = self._ranks(shape)
        checked = [row.amax(dim=-1, keepdim=True) if ranks else row[:, :1] for row in rows]
        ids = read_tokens(torch.cat(tokens), torch.cat(checked))
        nodes = [node for step in steps for node in step.nodes]
        in_order = [token for _, token in sorted(zip(nodes, ids, strict=True))]
        # This rank's tokens: they are in its cache.
        self._runner.resolve([in_order[step.nodes[index]] for step in steps for index in step.run])
        in_order = [int(token) for token in self._group.agree(in_order)]
        parents = None if shape is None else shape.parents
        if ranks or self._sampler.noise is not None or self._sampler.sampling.greedy:
            return Draft(in_order, None, parents)
        heads = [head + 1 for step in steps for head in step.heads]
        return Draft(in_order, self._spread(torch.cat(rows), heads), parents)

    def _spread(self, rows: Tensor, heads: list[int]) -> Tensor:
        """Return distributions over the target's vocabulary, those after node i in row i + 1."""
        if self._targets is not None:
            rows = rows.new_zeros((len(rows), self._sampler.vocab)).index_copy_(1, self._targets, rows)
        if heads == list(range(len(heads))):
            return rows
        index = upload(torch.tensor(heads), rows.device)
        return rows.new_zeros((max(heads) + 1, rows.shape[1])).index_copy_(0, index, rows)


def _paths(paths: list[list[int]], step: DraftStep, ids: list[int]) -> list[list[int]]:
    """Return the tentative tokens before each node that is run, from those before the heads and the nodes' `ids`."""
    return [[*paths[step.drawn[index] // step.most], ids[index]] for index in step.run]


class HeadDrafter(ModelDrafter):
    """A trained head. Its acceptance falls with the length of the sequence: the kind of its drafts."""

    def __init__(self, runner: HeadRunner, sampler: Sampler, group: Group) -> None:
        super().__init__(runner, sampler, group, runner.model.own.kind)
        self._head = runner

    def prior(self, kind: Hashable) -> float:
        return published_acceptance(self.name, 1 << (int(str(kind)) - 1))

    def draft_kind(self, sequence: TokenSequence) -> Hashable:
        return len(sequence).bit_length() if self._head.has_rows(sequence) else None
