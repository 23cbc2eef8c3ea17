"""The estimates of each drafter, and what its possible drafts are expected to cost and to yield."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..passes.estimators import MAX_RATIO, StepTimes, expected_tokens
from ..trees.acceptance import Acceptance
from ..trees.tree import DraftedTree, tree_of
from .cycle import Cycle

if TYPE_CHECKING:
    from ...sequence import TokenSequence
    from ..drafters.drafter import Drafter
    from ..trees.drafted_trees import DraftTrees

GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)


class DraftOption(NamedTuple):
    """A draft that may be chosen: a chain of `gamma` tokens, or a tree of that depth.

    `seconds` are those of drafting and verifying it, without one-off costs; `tokens` are those that a tree is expected
    to yield at the believed acceptance.
    """

    gamma: int
    seconds: float
    tree: DraftedTree | None = None
    tokens: float = 1.0

    def expected(self, acceptance: float, believed: float) -> float:
        """Return the expected tokens of a verification; a tree's gain changes as a chain's of its depth does."""
        chain = expected_tokens(acceptance, self.gamma)
        if self.tree is None:
            return chain
        usual = expected_tokens(believed, self.gamma)
        return 1 + (self.tokens - 1) * ((chain - 1) / (usual - 1) if usual > 1 else 1.0)


@dataclass
class Candidate:
    """A drafter's kind of draft at one choice.

    Attributes:
        rate, spread: the believed acceptance rate, and the standard deviation of that belief.
        setup_s: the estimated one-off cost of the next draft.
    """

    estimate: DrafterEstimate
    kind: Hashable
    acceptance: Acceptance
    rate: float
    spread: float
    options: list[DraftOption]
    setup_s: float

    def fastest(self, deviations: float = 0.0, most_s: float = float("inf")) -> tuple[float, DraftOption | None]:
        """Return the fewest seconds a token, and the draft; None if none is allowed.

        The acceptance is so many standard deviations above the mean. Only drafts whose cycles take at most `most_s`
        seconds are allowed.
        """
        acceptance = min(max(self.rate + deviations * self.spread, 0.0), 1.0)
        allowed = (option for option in self.options if option.seconds <= most_s)
        rated = ((option.seconds / option.expected(acceptance, self.rate), option) for option in allowed)
        return min(rated, key=lambda pair: pair[0], default=(float("inf"), None))

    def observe(self, number: int, cycle: Cycle) -> None:
        """Update the acceptance with the verification of this candidate's draft, in the cycle of that number."""
        self.acceptance.count(number, cycle.visits)


class DrafterEstimate:
    """The estimates of one drafter: its time per token, its one-off costs, and the acceptance of each kind of draft.

    Attributes:
        acceptance: by kind.
        times: of a draft step, by its rows: one of a chain, those with children of a depth of a tree.
        setups: one-off costs that were measured.
    """

    def __init__(
        self, drafter: Drafter, steps: StepTimes, gamma: int | None = None, trees: DraftTrees | None = None
    ) -> None:
        """`steps` are the times of the verifications. With `gamma`, drafts have that length, or are that deep."""
        self.drafter, self.trees = drafter, trees
        self.acceptance: dict[Hashable, Acceptance] = {}
        self.times = StepTimes(for_trees=True)
        self.setups = 0
        self._steps, self._deepest = steps, gamma
        self._gammas = tuple(length for length in GAMMAS if length <= drafter.longest) if gamma is None else (gamma,)
        self._drafts = 0

    @property
    def token_s(self) -> float:
        """The estimated seconds per drafted token of a chain."""
        return self._step_s(1)

    def _step_s(self, rows: int) -> float:
        """Return the estimated seconds of a draft step of some rows."""
        guess = self.drafter.relative_cost * self._steps.of(1)
        return guess and self.times.of(rows) * (1 if self.times.known else guess)

    def candidate(self, kind: Hashable, sequence: TokenSequence, limit: int, cycle: int) -> Candidate:
        """Return what drafts of at most `limit` tokens promise in a cycle."""
        acceptance = self.acceptance.setdefault(kind, Acceptance(self.drafter.prior(kind)))
        rates = acceptance.rate(cycle), acceptance.spread(cycle)
        self.times.relax(self.drafter.relative_cost * self._steps.of(1))
        options = [*self._chains(limit), *self._trees(kind, acceptance, limit, cycle)]
        return Candidate(self, kind, acceptance, *rates, options, self.drafter.setup_cost(sequence) * self._steps.of(1))

    def _chains(self, limit: int) -> Iterator[DraftOption]:
        if self.trees is not None and not self.trees.may_be_chain:
            return
        gammas = [gamma for gamma in self._gammas if gamma < limit]
        if len(gammas) < len(self._gammas):  # near the end: the last draft can be as long as the rest of the answer
            gammas.append(limit)
        for gamma in gammas:
            yield DraftOption(gamma, gamma * self.token_s + self._steps.of(gamma + 1))

    def _trees(self, kind: Hashable, acceptance: Acceptance, limit: int, cycle: int) -> Iterator[DraftOption]:
        if self.trees is None:
            return
        depth = min(limit, self._deepest or limit, self.trees.deepest)
        times = self._step_s, self._steps.of, self._steps.most_rows
        best = self.trees.best(kind, acceptance, cycle, depth, *times)
        if best.parents:
            tree = DraftedTree(best.parents, self.trees.sampling)
            yield DraftOption(tree_of(best.parents).depth, best.seconds, tree, best.tokens)

    def draft_time(self, cycle: Cycle) -> float:
        """Return the seconds of a cycle's draft without a one-off cost, and count both.

        The first draft may include allocations, so its time says nothing of the next one's.
        """
        self._drafts += 1
        if cycle.draft_setup:
            self.setups += 1
            return min(cycle.draft_s, self.token_s * cycle.drafted)
        rows, draft_s = _rows_of_draft(cycle), cycle.draft_s
        if self.times.known:
            draft_s = min(draft_s, MAX_RATIO * cycle.drafted * self.times.of(rows))
        if self._drafts > 1 and self.drafter.relative_cost > 0:
            self.times.observe(rows, draft_s / cycle.drafted)
        return draft_s


def _rows_of_draft(cycle: Cycle) -> int:
    """Return the mean rows of a draft's steps: a chain's have one, a tree's one for each node with children."""
    if cycle.parents is None:
        return 1
    inner = sum(bool(children) for children in tree_of(cycle.parents).children)
    return max(round(inner / cycle.drafted), 1)
