"""What the scheduler knows of each drafter, and what its possible drafts are expected to cost and to yield."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..passes.estimators import MAX_RATIO, Acceptance, DraftTimes, RowTimes, SetupTimes, expected_tokens
from ..trees.tree import DraftedTree, Visit, tree_of, visits

if TYPE_CHECKING:
    from ...sequence import TokenSequence
    from ..drafters.drafter import Drafter
    from ..passes.estimators import StepTimes
    from ..trees.drafted_trees import DraftTrees

GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 63)
_WIDTH = 0.2  # weight of a draft's width in its moving average
_LEAST_RATE = 0.01  # of an acceptance that others are relative to
_CAUTION = 0.2  # of the spread of an acceptance: a shorter draft may be slower by this factor


class Cycle(NamedTuple):
    """One draft and its verification, or a plain step if `drafter` is None.

    `first` is the first token emitted, `draft_s` and `verify_s` are seconds; `draft_setup` and `verify_setup` tell
    whether these include a one-off cost, such as a selection of the retrieval cache. `drafted` is the length of a
    chain, or the depth of a tree with these `parents`, of which the nodes `path` were accepted.
    """

    drafter: Drafter | None
    first: int
    drafted: int
    accepted: int
    draft_s: float
    verify_s: float
    draft_setup: bool = False
    verify_setup: bool = False
    parents: tuple[int, ...] | None = None  # None: a chain
    path: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return (self.drafted if self.parents is None else len(self.parents)) + 1

    @property
    def visits(self) -> list[Visit]:
        """What the verification tells of each node whose children it tried."""
        if self.parents is not None:
            return visits(tree_of(self.parents), self.path)
        return [Visit(1, 0)] * self.accepted + [Visit(1, None)] * (self.accepted < self.drafted)


class DraftOption(NamedTuple):
    """A draft that may be chosen: a chain of `gamma` tokens, or a tree of that depth.

    `seconds` are those of drafting and verifying it, without one-off costs. `tokens` are the ones that a tree is
    expected to yield at the believed acceptance. `fade` are the rates of the first token of a chain and of the others,
    relative to that of all; None if they are not told apart.
    """

    gamma: int
    seconds: float
    tree: DraftedTree | None = None
    tokens: float = 1.0
    fade: tuple[float, float] | None = None

    def expected(self, acceptance: float, believed: float) -> float:
        """Return the expected tokens of a verification; a tree's gain changes as a chain's of its depth does."""
        chain = expected_tokens(acceptance, self.gamma)
        if self.tree is None:
            if self.fade is None:
                return chain
            first, later = (min(acceptance * factor, 1.0) for factor in self.fade)
            return 1 + first * expected_tokens(later, self.gamma - 1)
        usual = expected_tokens(believed, self.gamma)
        return 1 + (self.tokens - 1) * ((chain - 1) / (usual - 1) if usual > 1 else 1.0)


class Arm:
    """The estimates of one drafter: its time per token, its one-off costs, and the acceptance of each kind of draft."""

    def __init__(
        self, drafter: Drafter, steps: StepTimes, gamma: int | None = None, trees: DraftTrees | None = None
    ) -> None:
        """`steps` are the times of the verifications. With `gamma`, drafts have that length, or are that deep."""
        self.drafter, self.steps, self.trees = drafter, steps, trees
        self.times, self.setups = DraftTimes(), SetupTimes()
        self.row_times = RowTimes()  # of a draft step by rows; measured for trees, and for drafts of one pass
        self.acceptance: dict[Hashable, Acceptance] = {}
        self.by_depth: dict[Hashable, tuple[Acceptance, Acceptance]] = {}  # of first and later tokens, if it fades
        longest = (each for each in GAMMAS if each <= drafter.longest)
        self._gammas = tuple(longest) if gamma is None else (gamma,)
        self._width = 1.0  # nodes of a draft by its depth
        self._deepest = gamma
        self._widest = 4  # nodes of a draft so far: trees double until the time of their rows is known
        self._drafts = 0

    @property
    def token_s(self) -> float:
        """The estimated seconds per drafted token of a chain."""
        if self.row_times.known:
            return self.row_times.of(1)
        return self.times.of(self.drafter.relative_cost * self.steps.of(1))

    def surprise(self, cycle: int) -> float:
        """Return by how much drafts of this drafter have been better than its prior; 0 of one that runs no model."""
        if self.drafter.relative_cost == 0:
            return 0.0
        return sum(acceptance.surprise(cycle) for acceptance in self.acceptance.values())

    def candidate(
        self, kind: Hashable, sequence: TokenSequence, limit: int, cycle: int, shift: float = 0.0
    ) -> Candidate:
        """Return what drafts of at most `limit` tokens promise in a cycle; `shift` is added to the acceptance prior."""
        acceptance = self.acceptance.setdefault(kind, Acceptance(self.drafter.prior(kind)))
        plain = self.steps.of(1)
        self.times.relax(self.drafter.relative_cost * plain)
        guess = self.drafter.setup_cost(sequence) * plain
        fade = self._fade(kind, cycle) if getattr(self.drafter, "fades", False) else None
        options = [*self._chains(limit, fade), *self._trees(kind, limit, cycle)]
        believed = acceptance.rate(cycle, shift), acceptance.spread(cycle, shift)
        return Candidate(self, kind, acceptance, believed, options, guess)

    def draft_time(self, cycle: Cycle) -> float:
        """Return the seconds of a cycle's draft, which includes no one-off cost, and count them."""
        self._drafts += 1
        self._widest = max(self._widest, cycle.rows - 1)
        if self.trees is None:
            self._width += _WIDTH * ((cycle.rows - 1) / cycle.drafted - self._width)
        if self.trees is None:
            draft_s = min(cycle.draft_s, MAX_RATIO * self.times.of(float("inf")) * cycle.drafted)
            self.times.observe(cycle.drafted, draft_s)
            return draft_s
        steps, rows = cycle.drafted, _rows_of_draft(cycle)
        draft_s = cycle.draft_s
        if self.row_times.known:
            draft_s = min(draft_s, MAX_RATIO * steps * self.row_times.of(rows))
        if self._drafts > 1 and self.drafter.relative_cost > 0:  # the first draft may include allocations
            self.row_times.observe(rows, draft_s / steps)
        return draft_s

    def _fade(self, kind: Hashable, cycle: int) -> tuple[float, float]:
        """Return the rates of first and later tokens of chains, relative to that of all."""
        prior = self.drafter.prior(kind)
        pair = self.by_depth.setdefault(kind, (Acceptance(prior), Acceptance(prior)))
        usual = max(self.acceptance[kind].rate(cycle), _LEAST_RATE)
        return pair[0].rate(cycle) / usual, pair[1].rate(cycle) / usual

    def observe_depths(self, kind: Hashable, cycle: int, drafted: int, accepted: int) -> None:
        """Count a verified chain."""
        if kind in self.by_depth:
            first, later = self.by_depth[kind]
            first.observe(cycle, 1, min(accepted, 1))
            if accepted:
                later.observe(cycle, drafted - 1, accepted - 1)

    def _chains(self, limit: int, fade: tuple[float, float] | None) -> Iterator[DraftOption]:
        if self.trees is None or self.trees.may_be_chain:
            gammas = [gamma for gamma in self._gammas if gamma < limit]
            if len(gammas) < len(self._gammas):  # near the end: the last draft can be as long as the rest of the answer
                gammas.append(limit)
            token_s = self.token_s
            for gamma in gammas:
                yield DraftOption(gamma, gamma * token_s + self.steps.of(round(gamma * self._width) + 1), fade=fade)

    def _trees(self, kind: Hashable, limit: int, cycle: int) -> Iterator[DraftOption]:
        if self.trees is None:
            return
        depth = min(limit, self._deepest or limit, self.trees.deepest)
        most = self.steps.most_rows if isinstance(self.steps, RowTimes) else limit
        found = self.trees.best(kind, cycle, depth, self._step_s, self.steps.of, most)
        if found.parents:
            tree = DraftedTree(found.parents, self.trees.sampling)
            yield DraftOption(tree_of(found.parents).depth, found.seconds, tree, found.tokens)

    def _step_s(self, rows: int) -> float:
        """Return the estimated seconds of a draft step of some rows."""
        if not self.drafter.relative_cost:
            return 0.0
        return self.row_times.of(rows) * (1.0 if self.row_times.known else self.token_s)


def _rows_of_draft(cycle: Cycle) -> int:
    """Return the mean rows of a draft's steps: a chain's have one, a tree's one for each node with children."""
    if cycle.parents is None:
        return 1
    inner = sum(bool(children) for children in tree_of(cycle.parents).children)
    return max(round(inner / cycle.drafted), 1)


class Candidate:
    """A drafter's kind of draft at one choice.

    Attributes:
        acceptance: the estimate that the draft's verification updates.
        options: the drafts to choose from.
        chosen: the one that was chosen.
        rate, spread: the believed acceptance rate, and the standard deviation of that belief.
        setup_guess, setup_s: the estimated one-off cost of the next draft, as the drafter and as measurements have it.
    """

    def __init__(
        self,
        arm: Arm,
        kind: Hashable,
        acceptance: Acceptance,
        believed: tuple[float, float],
        options: list[DraftOption],
        setup_guess: float,
    ) -> None:
        self.arm, self.acceptance, self._kind = arm, acceptance, kind
        self.rate, self.spread = believed
        self.options, self.setup_guess = options, setup_guess
        self.chosen: DraftOption | None = None
        self.setup_s = arm.setups.of(setup_guess)

    def fastest(self, acceptance: float, most_s: float = float("inf")) -> tuple[float, DraftOption | None]:
        """Return the fewest seconds a token at an acceptance rate, and the draft; None if none is allowed.

        Only drafts whose cycles take at most `most_s` seconds are allowed. The less is known of the acceptance, the
        more a shorter draft, which loses less if it is rejected, is preferred to one that promises hardly more.
        """
        allowed = (option for option in self.options if option.seconds <= most_s)
        rated = [(option.seconds / option.expected(acceptance, self.rate), option) for option in allowed]
        enough = (1 + _CAUTION * self.spread) * min((each for each, _ in rated), default=0.0)
        return next((each for each in rated if each[0] <= enough), (float("inf"), None))

    def observe(self, number: int, cycle: Cycle) -> None:
        """Update the acceptance with the verification of this candidate's draft, in the cycle of that number."""
        visits = cycle.visits
        first_alone = self.arm.trees is not None  # of a tree that grows, any child is as good as a chain's next token
        accepted = sum(visit.accepted == 0 if first_alone else visit.accepted is not None for visit in visits)
        self.acceptance.count(number, len(visits), accepted)
        if cycle.parents is None:
            self.arm.observe_depths(self._kind, number, cycle.drafted, cycle.accepted)
        if self.arm.trees is not None:
            self.arm.trees.observe(self._kind, number, visits)

    @property
    def low_s(self) -> float:
        """The fewest seconds a token if the acceptance rate is lower than believed, by a standard deviation."""
        return self.fastest(max(self.rate - self.spread, 0.0))[0]
