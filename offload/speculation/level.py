"""One level of speculation: a drafter proposes, a verifier accepts or rejects; the output follows the verifier.

A level is itself a drafter for the level above it; TriForce is two levels. Speculative sampling: Leviathan
et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch
from torch import Generator, Tensor

from ..events import LevelStatistics
from ..parallel import ALONE, Group
from ..sequence import TokenSequence
from ..tree_config import TreeSampling
from .adaptive import AdaptiveScheduler, Cycle
from .coupled import verify_coupled
from .draft import NOTHING, Draft, DraftedTree
from .draft_trees import DraftTrees
from .drafter import Drafter
from .noise import Noise
from .runner import Runner
from .sampling import Sampler, draw, read_tokens, sample
from .transfers import upload
from .tree import Verdict, paths
from .tree_verification import verify_tree

SELECTED_PRIOR = 0.9  # rate at which the full cache is expected to accept what a few percent of its KV draft


class Verifier(Protocol):
    """Computes the distribution that its level's output follows."""

    name: str
    relative_cost: float  # estimated time of a pass over one token, in plain steps of the target

    @property
    def setups(self) -> int:
        """How many one-off costs, such as selections of a retrieval cache, the scores have included so far."""
        ...

    def setup_cost(self, sequence: TokenSequence) -> float:
        """Estimate the one-off cost of the next score, in plain steps of the target; 0 if there is none."""
        ...

    def score(self, sequence: TokenSequence, draft: list[int], parents: Sequence[int] | None = None) -> Tensor:
        """Return the distributions after the sequence and after each token of the draft: `[len(draft) + 1, vocab]`.

        With the `parents` of a tree, those after a token follow the tokens on its path.
        """
        ...

    def settle(self, sequence: TokenSequence) -> None:
        """Drop from the cache the tokens that are not in the sequence, such as rejected ones."""
        ...

    def observe(self, drafted: int, accepted: int) -> None:
        """Note how many tokens drafted from this verifier's distribution the next level accepted."""
        ...


class ModelVerifier:
    """The target on one of its caches."""

    def __init__(self, name: str, runner: Runner, sampler: Sampler) -> None:
        self.name = name
        self.runner = runner
        self._sampler = sampler

    @property
    def relative_cost(self) -> float:
        return self.runner.relative_cost

    @property
    def setups(self) -> int:
        return self.runner.setups

    def setup_cost(self, sequence: TokenSequence) -> float:
        return self.runner.setup_cost(sequence)

    @torch.inference_mode()
    def score(self, sequence: TokenSequence, draft: list[int], parents: Sequence[int] | None = None) -> Tensor:
        if parents is not None:
            return self._score_tree(sequence, draft, parents)
        logits = self.runner.model.logits(self.runner.rows(sequence, draft))
        return self._sampler.distribution(logits, [*sequence.tentative, *draft])

    def _score_tree(self, sequence: TokenSequence, draft: list[int], parents: Sequence[int]) -> Tensor:
        logits = self.runner.model.logits(self.runner.tree_rows(sequence, draft, parents))
        needs_paths = self._sampler.reads_history
        return self._sampler.distribution(
            logits, paths=paths(sequence.tentative, draft, parents) if needs_paths else None
        )

    def settle(self, sequence: TokenSequence) -> None:
        self.runner.settle(sequence)

    def observe(self, drafted: int, accepted: int) -> None:
        self.runner.observe(drafted, accepted)


def verify(draft: Draft, target: Tensor, generator: Generator) -> tuple[int, int]:
    """Return how many tokens of the draft are accepted, and the token that follows them.

    Token x drawn from q is accepted with probability min(1, p(x) / q(x)). The first one that is not is replaced by a
    token drawn from the residual norm(max(p - q, 0)); if all are accepted, one more is drawn from the last row. The
    tokens that come out are distributed as if each had been drawn from p. All of it is computed on the device; the
    result comes to the host by one copy.

    Args:
        draft: tokens and the distributions q that they were drawn from.
        target: the distributions p, `[tokens + 1, vocab]`.

    Raises:
        TriforceError: if a row of `target` is NaN.
    """
    if not draft.tokens:
        return 0, sample(target[0], generator)
    drawn = upload(torch.tensor(draft.tokens), target.device)
    accepted = _accepted(drawn, draft.rows, target, generator)
    row = target.index_select(0, accepted)[0]
    token = draw(residual(row, drawn, draft.rows, accepted), generator)
    count, following = read_tokens(torch.cat((accepted, token)), target)
    return count, following


def _accepted(drawn: Tensor, rows: Tensor | None, target: Tensor, generator: Generator) -> Tensor:
    """Return how many of the drawn tokens are accepted, `[1]`: those before the first one that is rejected."""
    p = target[:-1].gather(1, drawn.unsqueeze(1)).squeeze(1)
    q = torch.ones_like(p) if rows is None else rows.gather(1, drawn.unsqueeze(1)).squeeze(1)
    chance = torch.rand(len(drawn), generator=generator, device=target.device)
    rejected = chance * q >= p
    return rejected.logical_not().long().cumprod(0).sum(0, keepdim=True)


def residual(row: Tensor, drawn: Tensor, rows: Tensor | None, index: Tensor) -> Tensor:
    """Return max(p - q, 0) `[vocab]`, not normalised, for the rejected token number `index` `[1]` of the draft.

    If `index` is the number of `drawn` tokens, none was rejected, and the row p is returned.
    """
    last = len(drawn) - 1
    is_rejected, index = index <= last, index.clamp(max=last)
    if rows is None:
        token = drawn.index_select(0, index)
        return row.index_copy(0, token, row.index_select(0, token) * is_rejected.logical_not())
    # Products with 0 or 1 choose: on a CPU, they are several times faster than torch.where and any.
    difference = row.addcmul(rows.index_select(0, index)[0], is_rejected.to(row.dtype), value=-1).clamp_(min=0)
    is_zero = difference.amax() == 0  # p equals q but for rounding
    return difference.addcmul_(row, is_zero.to(row.dtype))


def verify_draft(draft: Draft, target: Tensor, generator: Generator, sampling: TreeSampling) -> Verdict:
    """Return what `verify` accepts of a chain, or `verify_tree` of a tree whose children were drawn by `sampling`."""
    if draft.parents is not None:
        return verify_tree(draft.tokens, draft.parents, draft.rows, target, generator, sampling)
    accepted, token = verify(draft, target, generator)
    return Verdict(list(range(accepted)), token)


def _propose(drafter: Drafter, sequence: TokenSequence, limit: int, shape: DraftedTree | None) -> Draft:
    return drafter.propose(sequence, limit) if shape is None else drafter.propose(sequence, limit, shape)


class Level:
    """A verifier and the scheduler that chooses its drafters; itself a Drafter."""

    def __init__(
        self,
        name: str,
        verifier: Verifier,
        scheduler: AdaptiveScheduler,
        generator: Generator,
        clock: Callable[[], float],
        group: Group = ALONE,
        prior: float = SELECTED_PRIOR,
        noise: Noise | None = None,
        trees: DraftTrees | None = None,
    ) -> None:
        """Create a level.

        Args:
            prior: the rate at which the next level is expected to accept this one's tokens.
            noise: makes sampling coupled: nothing is drawn with the generator.
            trees: the shapes of the drafts of drafters that can branch; None for chains.
        """
        self.name, self.prior = name, prior
        self._noise, self._trees = noise, trees
        self._group = group
        self._verifier = verifier
        self._scheduler = scheduler
        self._generator = generator
        self._clock = clock
        self.statistics: dict[str, LevelStatistics] = {}
        self.relative_cost = verifier.relative_cost
        self.using = "none"  # the drafter of the last verification

    def draft_kind(self, sequence: TokenSequence) -> Hashable:
        return self.name

    @property
    def setups(self) -> int:
        return self._verifier.setups

    def setup_cost(self, sequence: TokenSequence) -> float:
        return self._verifier.setup_cost(sequence)

    def observe(self, drafted: int, accepted: int) -> None:
        self._verifier.observe(drafted, accepted)

    @torch.inference_mode()
    def advance(self, sequence: TokenSequence, limit: int) -> Draft:
        """Draft and verify once: append 1 to `limit` tokens to the sequence, and return them.

        A draft has at most `limit` - 1 tokens, because the verifier adds one.
        """
        start = self._clock()
        drafter, gamma = self._scheduler.choose(sequence, limit - 1)
        setups = 0 if drafter is None else drafter.setups, self._verifier.setups
        shape = self._trees.shape(gamma) if self._trees is not None and gamma > 0 else None
        draft = _propose(drafter, sequence, gamma, shape) if drafter is not None and gamma > 0 else NOTHING
        drafted = self._clock()
        target = self._score(sequence, draft)
        path, token = self._verify(draft, target, len(sequence), shape)
        end = self._clock()
        # All ranks use rank 0's result and times: clocks differ, and so may the last bit of a sum.
        result = path[-1] + 1 if path else 0, token
        *result, draft_s, verify_s = self._group.agree((*result, drafted - start, end - drafted))
        last, token = map(int, result)
        path = draft.path(last - 1)
        accepted = len(path)
        emitted = [*(draft.tokens[node] for node in path), token]
        sequence.extend(emitted)
        self._verifier.settle(sequence)
        if draft.tokens:
            drafter.observe(draft.depth, accepted)
        if draft.parents is not None:
            self._trees.observe(draft.parents, path)
        drafter = drafter if draft.tokens else None
        included = drafter is not None and drafter.setups > setups[0], self._verifier.setups > setups[1]
        cycle = Cycle(drafter, emitted[0], draft.depth, accepted, draft_s, verify_s, *included, len(draft.tokens))
        self._scheduler.observe(cycle)
        self._count(cycle)
        if self._noise is not None:
            return Draft(emitted, None)
        rows = target[: last + 1] if draft.parents is None else target[[0, *(node + 1 for node in path)]]
        return Draft(emitted, rows)

    def _verify(self, draft: Draft, target: Tensor, position: int, shape: DraftedTree | None) -> Verdict:
        """Return what is accepted of the draft, and the token that follows; row 0 is for `position`."""
        if self._noise is None:
            sampling = TreeSampling.WITHOUT_REPLACEMENT if shape is None else shape.sampling
            return verify_draft(draft, target, self._generator, sampling)
        picks = self._noise.pick(target, [position, *(position + depth for depth in draft.depths)])
        return verify_coupled(draft.tokens, read_tokens(picks, target), draft.parents)

    def _score(self, sequence: TokenSequence, draft: Draft) -> Tensor:
        if draft.parents is None:
            return self._verifier.score(sequence, draft.tokens)
        return self._verifier.score(sequence, draft.tokens, draft.parents)

    def propose(self, sequence: TokenSequence, limit: int, tree: DraftedTree | None = None) -> Draft:
        """Return exactly `limit` tokens with the verifier's distribution, as a draft for the next level."""
        start = len(sequence)
        parts: list[Draft] = []
        try:
            while len(sequence) < start + limit:
                parts.append(self.advance(sequence, start + limit - len(sequence)))
            rows = torch.cat([part.rows for part in parts]) if self._noise is None else None
            return Draft(sequence.tokens[start:], rows)
        finally:
            sequence.truncate(start)

    def _count(self, cycle: Cycle) -> None:
        name = self.using = cycle.drafter.name if cycle.drafter is not None else "none"
        known = self.statistics.get(name, LevelStatistics(name, self._verifier.name))
        self.statistics[name] = known.plus(cycle.drafted, cycle.accepted, cycle.draft_s, cycle.verify_s)


def speculate(
    name: str,
    verifier: Verifier,
    scheduler: AdaptiveScheduler,
    generator: Generator,
    clock: Callable[[], float] = time.perf_counter,
    group: Group = ALONE,
    prior: float = SELECTED_PRIOR,
    noise: Noise | None = None,
    trees: DraftTrees | None = None,
) -> Level:
    """Return a level that verifies what the scheduler's drafters propose; without drafters it decodes plainly.

    Arguments as of `Level`.
    """
    return Level(name, verifier, scheduler, generator, clock, group, prior, noise, trees)
