"""Choose the drafter and the draft length with the highest expected throughput, at each level of speculation."""

from collections.abc import Callable, Hashable, Sequence

from ...events import Gain
from ...sequence import TokenSequence
from ..drafters.drafter import Drafter
from ..passes.estimators import MAX_RATIO, ROW_COST, Acceptance, RowTimes, StepTimes
from ..trees.drafted_trees import DraftTrees
from ..trees.tree import DraftedTree
from .drafter_estimates import Arm, Candidate, Cycle
from .gain import GainMeter, LossBudget

HORIZON = 512  # tokens to come, if it is not known
_MARGIN = 1.03  # drafting is chosen if its expected rate exceeds plain decoding's by this factor: less may be noise
_PLAIN_EVERY = 24  # cycles between plain steps: their time, which speculation competes with, must stay up to date
_PLAIN_SHARE = 0.01  # of the time, which plain steps may cost where drafting is faster
_RESELECT = 64  # tokens over which a later one-off cost pays back: about the tail of the retrieval cache
_REGIME = 128  # tokens over which a trial pays back: then the text may have changed
_PACE_KEEP = 0.5  # the weight of a cycle in the recent time per token, relative to the next one's
_SURE = 1.35  # drafting needs no plain step to compare with if it promises this much more at a low acceptance
_LEARNING = 0.75  # of a gain remains: the first drafts have not the best length
_LISTEN = 8  # cycles before a one-off cost is paid: drafts that cost nothing may be good enough
_SETUP_SHARE = 0.03  # of the time, which a one-off cost that does not pay back may take
_SHARED = 0.6  # of how much one drafter surprises, which is due to the text, and is expected of the others too
_LUCK = 0.2  # probability that a drafter is better than believed by a standard deviation


class AdaptiveScheduler:
    """Chooses among drafters and draft lengths, from estimates of times and of acceptance rates.

    The estimates start from priors. A one-off cost, such as the first selection of the retrieval cache, is estimated
    before it is paid, has to pay back within the tokens to come, and does not count as the drafter's time per token.

    Args:
        drafters: the drafters to choose from; without any, every step is plain decoding.
        gamma: a fixed draft length, or None for the one with the highest expected throughput.
        may_pause: whether plain steps are a choice too. Rejected drafts then cost at most a few percent of the time.
        horizon: the number of tokens to come.
        trees: makes the chooser of a drafter's trees, for those that can branch, given whether it drafts in one pass;
            None for chains.
        row_cost: the expected time of each further row of a verification, relative to a plain step.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter] = (),
        gamma: int | None = None,
        may_pause: bool = False,
        horizon: int = HORIZON,
        trees: Callable[[], DraftTrees] | None = None,
        row_cost: float = ROW_COST,
    ) -> None:
        self._may_pause = may_pause
        self._steps = StepTimes(row_cost) if trees is None else RowTimes(row_cost)
        self._arms = tuple(
            Arm(each, self._steps, gamma, trees() if trees is not None and each.branches else None) for each in drafters
        )
        self._budget = LossBudget(horizon)
        self._gain = GainMeter()
        self._left = horizon
        self._cycle = 0
        self._plain_at = 0  # the last cycle that was a plain step
        self._since_plain = 0.0  # seconds
        self._recent = (0.0, 0.0)  # seconds and tokens of the last cycles
        self._chosen: Candidate | None = None
        self._guesses: list[tuple[Candidate, int]] = []  # of free drafters, for the next token

    def choose(self, sequence: TokenSequence, limit: int) -> tuple[Drafter | None, int]:
        """Return a drafter and how many tokens it should draft, at most `limit`; (None, 0) is a plain step.

        Of a tree, whose shape is then in `tree`, it is the depth.

        The first step is plain: the first token comes from the prompt's last row, which prefill has computed.
        """
        self._cycle += 1
        self._chosen, self._guesses = None, []
        if limit < 1 or self._cycle == 1 or not self._arms:
            return None, 0
        candidates = [
            arm.candidate(kind, sequence, limit, self._cycle, self._shift(arm))
            for arm in self._arms
            if (kind := arm.drafter.draft_kind(sequence)) is not None
        ]
        if self._may_pause:
            self._guess(candidates, sequence)
        self._chosen = self._best(candidates)
        if self._chosen is None:
            return None, 0
        return self._chosen.arm.drafter, self._chosen.chosen.gamma

    @property
    def tree(self) -> DraftedTree | None:
        """The shape of the tree that the last choice drafts; None for a chain or a plain step."""
        return None if self._chosen is None else self._chosen.chosen.tree

    @property
    def gain(self) -> Gain | None:
        """What the drafts have gained over plain steps; None without drafters, or too few plain steps to compare."""
        return self._gain.gain if self._arms else None

    def observe(self, cycle: Cycle) -> None:
        """Update the estimates with the result of the last choice."""
        emitted = cycle.accepted + 1
        self._left = max(self._left - emitted, 1)
        if self._cycle == 1 or not self._arms:
            return  # the first step runs no model pass: its time is not representative
        self._observe_acceptance(cycle)
        if cycle.verify_setup:
            return  # the time of the step itself is not known
        verify_s = cycle.verify_s
        if self._steps.known:  # a pause of the machine must not count against drafting
            verify_s = min(verify_s, MAX_RATIO * self._steps.of(cycle.rows))
        self._steps.observe(cycle.rows, verify_s)
        self._gain.observe(cycle, self._steps.of(1) if 1 in self._steps else None)
        draft_s = self._draft_time(cycle)
        if cycle.drafter is None:
            self._plain_at, self._since_plain = self._cycle, 0.0
        seconds = draft_s + verify_s
        self._since_plain += seconds
        self._recent = tuple(_PACE_KEEP * old + new for old, new in zip(self._recent, (seconds, emitted), strict=True))
        self._budget.observe(cycle.drafter is not None, emitted, seconds, self._steps.of(1))

    def acceptance(self, drafter: Drafter, kind: Hashable) -> Acceptance | None:
        """Return the acceptance of a drafter's drafts of a kind; None before they were considered."""
        return next(arm for arm in self._arms if arm.drafter is drafter).acceptance.get(kind)

    def _shift(self, arm: Arm) -> float:
        """Return how much better a drafter's prior should be, from what others have shown: text is hard for all."""
        if arm.drafter.relative_cost == 0:
            return 0.0
        return _SHARED * sum(other.surprise(self._cycle) for other in self._arms if other is not arm)

    def _guess(self, candidates: Sequence[Candidate], sequence: TokenSequence) -> None:
        """Keep the next token of drafters whose drafts cost nothing: the next cycle shows whether it was right."""
        for candidate in candidates:
            if candidate.arm.drafter.relative_cost == 0:
                self._guesses.append((candidate, candidate.arm.drafter.propose(sequence, 1).tokens[0]))

    def _observe_acceptance(self, cycle: Cycle) -> None:
        chosen = self._chosen if cycle.drafter is not None else None
        if chosen is not None:
            chosen.observe(self._cycle, cycle)
        for candidate, token in self._guesses:
            if candidate is not chosen:
                candidate.acceptance.observe(self._cycle, 1, int(token == cycle.first))

    def _draft_time(self, cycle: Cycle) -> float:
        """Return the seconds of a cycle's draft without a one-off cost, which is booked apart, and count both."""
        if cycle.drafter is None:
            return 0.0
        chosen = self._chosen
        if not cycle.draft_setup:
            return chosen.arm.draft_time(cycle)
        tokens = self._pays_back_over(chosen)
        chosen.arm.times.limit(cycle.drafted, cycle.draft_s)
        draft_s = min(cycle.draft_s, chosen.arm.token_s * cycle.drafted)
        chosen.arm.setups.observe(chosen.setup_guess, cycle.draft_s - draft_s)
        self._budget.invest(cycle.draft_s - draft_s, tokens)
        return draft_s

    def _best(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the candidate with the lowest expected time a token; None for a plain step."""
        if not self._may_pause:
            for candidate in candidates:
                candidate.chosen = candidate.fastest(candidate.rate)[1]
            return min(candidates, key=lambda candidate: candidate.fastest(candidate.rate)[0], default=None)
        if not self._steps.known:
            candidates = [candidate for candidate in candidates if candidate.low_s * _SURE < 1]  # plain steps
        plain = self._steps.of(1)
        best, least = None, plain
        for candidate in sorted(candidates, key=lambda candidate: candidate.setup_s > 0):
            each, option = candidate.fastest(candidate.rate, self._budget.most_s(plain))
            if candidate.setup_s and not self._can_afford_setup(candidate, each, least):
                continue
            if each * _MARGIN < plain and each < least:
                best, least, candidate.chosen = candidate, each, option
        if best is None:
            best = next((candidate for candidate in candidates if self._is_worth_a_trial(candidate, plain)), None)
        return None if best is None or self._needs_plain_step(least) else best

    def _pays_back_over(self, candidate: Candidate) -> int:
        """Return over how many tokens a one-off cost pays back: the first one is the largest, and serves all tokens."""
        return self._left if candidate.arm.setups.count == 0 else min(self._left, _RESELECT)

    def _can_afford_setup(self, candidate: Candidate, each: float, usual: float) -> bool:
        """Return whether a one-off cost pays back at `each` expected seconds a token, compared with the recent tokens.

        The comparison is also with `usual` seconds a token, which other candidates promise without such a cost. If the
        acceptance rate is lower than believed, it must be a small loss. In the first cycles it waits for what drafts
        without a cost bring, unless plain steps meanwhile take longer.
        """
        tokens = self._pays_back_over(candidate)
        if candidate.arm.setups.count:  # the recent pace is its own: what else may be done now counts
            return candidate.setup_s <= tokens * _LEARNING * (usual - each)
        if self._recent[1]:
            usual = min(usual, self._recent[0] / self._recent[1])
            waits = _LISTEN - self._cycle
            if waits > 0 and candidate.setup_s > waits * (self._steps.of(1) - each):
                return False
        high, low = (_LEARNING * max(usual - seconds, 0.0) for seconds in (each, candidate.low_s))
        return candidate.setup_s <= tokens * min(high, low + _SETUP_SHARE * usual)

    def _is_worth_a_trial(self, candidate: Candidate, plain: float) -> bool:
        """Return whether a draft may gain more, if its acceptance is higher than believed, than it costs to find out.

        The expected loss of one cycle is compared with the gain over the tokens to come.
        """
        high = min(candidate.rate + candidate.spread, 1.0)
        each, option = candidate.fastest(high, self._budget.most_s(plain))
        if option is None or candidate.arm.drafter.relative_cost == 0:  # free drafts are scored without a trial
            return False
        gain = _LUCK * (plain / _MARGIN - each) * min(self._left, _REGIME)
        loss = option.seconds - plain * option.expected(candidate.rate, candidate.rate) + candidate.setup_s
        candidate.chosen = option
        return gain > max(loss, 0.0) and (not candidate.setup_s or self._can_afford_setup(candidate, each, plain))

    def _needs_plain_step(self, least: float) -> bool:
        """Return whether the time of a plain step is out of date, where drafting takes `least` seconds a token."""
        if self._cycle - self._plain_at <= _PLAIN_EVERY:
            return False
        return self._steps.of(1) - least <= _PLAIN_SHARE * self._since_plain
