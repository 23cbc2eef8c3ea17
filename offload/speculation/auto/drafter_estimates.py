"""What the scheduler knows of each drafter, and what its possible drafts are expected to cost and to yield."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..passes.estimators import MAX_RATIO, Acceptance, RowTimes, expected_tokens
from ..trees.tree import DraftedTree, tree_of
from .cycle import Cycle

if TYPE_CHECKING:
    from ...sequence import TokenSequence
    from ..drafters.drafter import Drafter
    from ..passes.estimators import StepTimes
    from ..trees.drafted_trees import DraftTrees

GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
_MOST_SETUP = 10.0  # an estimated one-off cost is corrected by this factor at most: a measured one may be a pause


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
        self.times = RowTimes()
        self.setups = 0
        self._steps, self._deepest = steps, gamma
        self._gammas = tuple(each for each in GAMMAS if each <= drafter.longest) if gamma is None else (gamma,)
        self._setup_ratio, self._drafts = 1.0, 0

    @property
    def token_s(self) -> float:
        """The estimated seconds per drafted token of a chain."""
        return self._step_s(1)

    def _step_s(self, rows: int) -> float:
        """Return the estimated seconds of a draft step of some rows."""
        guess = self.drafter.relative_cost * self._steps.of(1)
        return guess and (self.times.of(rows) if self.times.known else self.times.of(rows) * guess)

    def candidate(self, kind: Hashable, sequence: TokenSequence, limit: int, cycle: int) -> Candidate:
        """Return what drafts of at most `limit` tokens promise in a cycle."""
        acceptance = self.acceptance.setdefault(kind, Acceptance(self.drafter.prior(kind)))
        plain = self._steps.of(1)
        self.times.relax(self.drafter.relative_cost * plain)
        guess = self.drafter.setup_cost(sequence) * plain
        options = [*self._chains(limit), *self._trees(kind, limit, cycle)]
        return Candidate(self, kind, acceptance, cycle, options, guess, self._setup_ratio * guess)

    def _chains(self, limit: int) -> Iterator[DraftOption]:
        if self.trees is not None and not self.trees.may_be_chain:
            return
        gammas = [gamma for gamma in self._gammas if gamma < limit]
        if len(gammas) < len(self._gammas):  # near the end: the last draft can be as long as the rest of the answer
            gammas.append(limit)
        for gamma in gammas:
            yield DraftOption(gamma, gamma * self.token_s + self._steps.of(gamma + 1))

    def _trees(self, kind: Hashable, limit: int, cycle: int) -> Iterator[DraftOption]:
        if self.trees is None:
            return
        depth = min(limit, self._deepest or limit, self.trees.deepest)
        most = self._steps.most_rows if isinstance(self._steps, RowTimes) else limit
        found = self.trees.best(kind, cycle, depth, self._step_s, self._steps.of, most)
        if found.parents:
            tree = DraftedTree(found.parents, self.trees.sampling)
            yield DraftOption(tree_of(found.parents).depth, found.seconds, tree, found.tokens)

    def draft_time(self, cycle: Cycle, setup_guess: float) -> float:
        """Return the seconds of a cycle's draft without a one-off cost, and count both.

        The first draft may include allocations, so it tells nothing of the time.
        """
        self._drafts += 1
        if cycle.draft_setup:
            draft_s = min(cycle.draft_s, self.token_s * cycle.drafted)
            self.setups += 1
            if setup_guess > 0:
                ratio = (cycle.draft_s - draft_s) / setup_guess
                self._setup_ratio = min(max(ratio, 1 / _MOST_SETUP), _MOST_SETUP)
            return draft_s
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


class Candidate:
    """A drafter's kind of draft at one choice.

    Attributes:
        rate, spread: the believed acceptance rate, and the standard deviation of that belief.
        chosen: the draft that was chosen.
        setup_guess, setup_s: the estimated one-off cost of the next draft, as the drafter and as measurements have it.
    """

    def __init__(
        self,
        estimate: DrafterEstimate,
        kind: Hashable,
        acceptance: Acceptance,
        cycle: int,
        options: list[DraftOption],
        setup_guess: float,
        setup_s: float,
    ) -> None:
        self.estimate, self.acceptance, self._kind = estimate, acceptance, kind
        self.rate, self.spread = acceptance.rate(cycle), acceptance.spread(cycle)
        self.setup_guess, self.setup_s = setup_guess, setup_s
        self._options = options
        self.chosen: DraftOption | None = None

    def fastest(self, acceptance: float, most_s: float = float("inf")) -> tuple[float, DraftOption | None]:
        """Return the fewest seconds a token at an acceptance rate, and the draft; None if none is allowed.

        Only drafts whose cycles take at most `most_s` seconds are allowed.
        """
        acceptance = min(max(acceptance, 0.0), 1.0)
        allowed = (option for option in self._options if option.seconds <= most_s)
        rated = ((option.seconds / option.expected(acceptance, self.rate), option) for option in allowed)
        return min(rated, key=lambda each: each[0], default=(float("inf"), None))

    def observe(self, number: int, cycle: Cycle) -> None:
        """Update the acceptance with the verification of this candidate's draft, in the cycle of that number."""
        visits, trees = cycle.visits, self.estimate.trees
        self.acceptance.count(number, len(visits), sum(visit.accepted == 0 for visit in visits))
        if trees is not None:
            trees.observe(self._kind, number, visits)
