"""Choose the drafter and the draft length with the most expected tokens a second, at each level of speculation."""

from collections.abc import Callable, Sequence

from ...events import Gain
from ...sequence import TokenSequence
from ..drafters.drafter import Drafter
from ..passes.estimators import MAX_RATIO, ROW_COST, StepTimes
from ..trees.drafted_trees import DraftTrees
from ..trees.tree import DraftedTree, Visit
from .cycle import Cycle
from .drafter_estimates import Candidate, DrafterEstimate, DraftOption
from .gain import SHARE, GainMeter, LossBudget

HORIZON = 512  # tokens to come, if it is not known
_MARGIN = 1.03  # drafting is chosen if it promises this factor over plain decoding: less may be noise
_PLAIN_EVERY = 24  # cycles between plain steps: their time, which speculation competes with, must stay up to date
_PLAIN_SHARE = 0.01  # of the time, which plain steps may cost where drafting is faster
_LISTEN = 8  # cycles before a first one-off cost is paid: drafts without one may be good enough
_UNLUCKY = 2.0  # standard deviations below the mean, at which a first one-off cost must lose no more than its share


class AdaptiveScheduler:
    """Chooses among drafters and draft lengths by their expected tokens a second.

    The estimate of an acceptance is a Beta distribution, which forgets; the times are moving averages. Both start from
    priors. A one-off cost, such as the first selection of the retrieval cache, is spread over the tokens to come.
    A draft must fit the loss budget if all of it is rejected; within that, one that promises nothing on average is
    tried if it would with a better acceptance, by a standard deviation.

    Args:
        drafters: the drafters to choose from; without any, every step is plain decoding.
        gamma: a fixed draft length, or None for the one with the highest expected throughput.
        may_pause: whether plain steps are a choice too. Rejected drafts then cost at most a few percent of the time.
        horizon: the number of tokens to come.
        trees: makes the chooser of a drafter's trees, for those that can branch; None for chains.
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
        self._steps = StepTimes(row_cost, for_trees=trees is not None)
        self._estimates = tuple(
            DrafterEstimate(drafter, self._steps, gamma, trees() if trees is not None and drafter.branches else None)
            for drafter in drafters
        )
        self._budget, self._gain = LossBudget(), GainMeter()
        self._left, self._cycle = horizon, 0
        self._plain_at = 0  # the last cycle that was a plain step
        self._since_plain = 0.0  # seconds
        self._chosen: tuple[Candidate, DraftOption] | None = None
        self._guesses: list[tuple[Candidate, int]] = []  # of free drafters, for the next token

    def choose(self, sequence: TokenSequence, limit: int) -> tuple[Drafter | None, int]:
        """Return a drafter and how many tokens it should draft, at most `limit`; (None, 0) is a plain step.

        Of a tree, whose shape is then in `tree`, it is the depth. The first step is plain: the first token comes from
        the prompt's last row, which prefill has computed.
        """
        self._cycle += 1
        self._chosen, self._guesses = None, []
        if limit < 1 or self._cycle == 1 or not self._estimates:
            return None, 0
        candidates = [
            estimate.candidate(kind, sequence, limit, self._cycle)
            for estimate in self._estimates
            if (kind := estimate.drafter.draft_kind(sequence)) is not None
        ]
        if self._may_pause:
            self._guess(candidates, sequence)
            self._chosen = self._best(candidates)
        else:
            self._chosen = _least([(*candidate.fastest(), candidate) for candidate in candidates])[1]
        if self._chosen is None:
            return None, 0
        candidate, option = self._chosen
        return candidate.estimate.drafter, option.gamma

    @property
    def tree(self) -> DraftedTree | None:
        """The shape of the tree that the last choice drafts; None for a chain or a plain step."""
        return None if self._chosen is None else self._chosen[1].tree

    @property
    def gain(self) -> Gain | None:
        """The gain of the drafts over plain steps; None without drafters, or too few plain steps to compare."""
        return self._gain.gain if self._estimates else None

    def observe(self, cycle: Cycle) -> None:
        """Update the estimates with the result of the last choice."""
        emitted = cycle.accepted + 1
        self._left = max(self._left - emitted, 1)
        if self._cycle == 1 or not self._estimates:
            return  # the first step runs no model pass: its time is not representative
        chosen = self._chosen[0] if self._chosen is not None and cycle.drafter is not None else None
        if chosen is not None:
            chosen.observe(self._cycle, cycle)
        for candidate, token in self._guesses:
            if candidate is not chosen:
                candidate.acceptance.count(self._cycle, [Visit(1, 0 if token == cycle.first else None)])
        if cycle.verify_setup:
            return  # the time of the step itself is not known
        verify_s = cycle.verify_s
        if self._steps.known:  # a pause of the machine must not count against drafting
            verify_s = min(verify_s, MAX_RATIO * self._steps.of(cycle.rows))
        self._steps.observe(cycle.rows, verify_s)
        self._gain.observe(cycle, self._steps.of(1) if 1 in self._steps else None)
        if chosen is None:
            self._plain_at, self._since_plain = self._cycle, 0.0
        seconds = verify_s if chosen is None else verify_s + chosen.estimate.draft_time(cycle)
        self._since_plain += seconds
        self._budget.observe(chosen is not None, emitted, seconds, self._steps.of(1))

    def _guess(self, candidates: Sequence[Candidate], sequence: TokenSequence) -> None:
        """Keep the next token of drafters whose drafts cost nothing: the next cycle shows whether it was right."""
        for candidate in candidates:
            drafter = candidate.estimate.drafter
            if drafter.relative_cost == 0:
                self._guesses.append((candidate, drafter.propose(sequence, 1).tokens[0]))

    def _best(self, candidates: Sequence[Candidate]) -> tuple[Candidate, DraftOption] | None:
        """Return the draft with the lowest expected time a token; None for a plain step."""
        plain = self._steps.of(1)
        if not self._steps.known:  # nothing is measured: only what gains much if it is worse than believed
            candidates = [candidate for candidate in candidates if self._price(candidate, -1.0)[0] * 4 / 3 < plain]
        for deviations in (0.0, 1.0):
            # Free drafts are scored without a trial.
            tried = [item for item in candidates if not deviations or item.estimate.drafter.relative_cost]
            price, best = _least([(*self._price(candidate, deviations), candidate) for candidate in tried])
            if price < plain / _MARGIN:
                return None if self._needs_plain_step(price) else best
        return None

    def _price(self, candidate: Candidate, deviations: float) -> tuple[float, DraftOption | None]:
        """Return the expected seconds a token, at an acceptance so many standard deviations above the mean; the draft.

        A first one-off cost waits for what drafts without one bring, unless plain steps take longer meanwhile.
        """
        plain, setup = self._steps.of(1), candidate.setup_s
        most_s = self._budget.most_s(plain)
        price, option = candidate.fastest(deviations, most_s)
        if setup and option is not None:
            if not candidate.estimate.setups:
                low = candidate.fastest(-_UNLUCKY, most_s)[0]
                is_safe = setup <= self._left * (max(plain - low, 0.0) + SHARE * plain)
                if deviations > 0 or not is_safe or setup > max(_LISTEN - self._cycle, 0) * (plain - price) > 0:
                    return float("inf"), None
            price += setup / self._left
        return price, option

    def _needs_plain_step(self, least: float) -> bool:
        """Return whether the time of a plain step is out of date, where drafting takes `least` seconds a token."""
        if self._cycle - self._plain_at <= _PLAIN_EVERY:
            return False
        return self._steps.of(1) - least <= _PLAIN_SHARE * self._since_plain


def _least(
    priced: Sequence[tuple[float, DraftOption | None, Candidate]],
) -> tuple[float, tuple[Candidate, DraftOption] | None]:
    """Return the lowest price of drafts, and the draft; infinity and None if there is none."""
    price, option, candidate = min(priced, key=lambda item: item[0], default=(float("inf"), None, None))
    return price, None if option is None or candidate is None else (candidate, option)
