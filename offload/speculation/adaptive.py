"""Choose the drafter and the draft length with the highest expected throughput, at each level of speculation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ..sequence import TokenSequence
from .drafter import Drafter
from .estimators import MAX_RATIO, Acceptance, DraftTimes, StepTimes, expected_tokens

GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
_MARGIN = 1.05  # drafting is chosen if its expected rate exceeds plain decoding's by this factor: less may be noise
_PLAIN_EVERY = 24  # cycles between plain steps: their time, which speculation competes with, must stay up to date
_LOSS_SHARE = 0.03  # share of the decoding time that rejected drafts may cost
_MAX_CREDIT = 16  # plain steps; earlier gains above this do not pay for later losses


class Cycle(NamedTuple):
    """One draft and its verification, or a plain step if `drafter` is None.

    `first` is the first token emitted, `draft_s` and `verify_s` are seconds.
    """

    drafter: Drafter | None
    first: int
    drafted: int
    accepted: int
    draft_s: float
    verify_s: float


class LossBudget:
    """The seconds that rejected drafts may cost: the gains so far over plain steps, and a share of the time."""

    def __init__(self) -> None:
        self._credit: float | None = None  # seconds

    def allows(self, loss: float, plain: float) -> bool:
        """Return whether a draft may be tried that costs `loss` seconds if all of it is rejected."""
        return loss <= (plain if self._credit is None else self._credit)

    def observe(self, cycle: Cycle, plain: float) -> None:
        """Add the gain or loss of a cycle, where a plain step takes `plain` seconds."""
        seconds = cycle.draft_s + cycle.verify_s
        credit = plain if self._credit is None else self._credit
        credit += _LOSS_SHARE * seconds
        if cycle.drafter is not None:
            credit += plain * (cycle.accepted + 1) - seconds
        self._credit = min(credit, _MAX_CREDIT * plain)


class AdaptiveScheduler:
    """Chooses among drafters and draft lengths, from measured times and moving averages of the acceptance rate.

    Args:
        drafters: the drafters to choose from; without any, every step is plain decoding.
        gamma: a fixed draft length, or None for the one with the highest expected throughput.
        may_pause: whether plain steps are a choice too. Rejected drafts then cost at most a few percent of the time.
    """

    def __init__(self, drafters: Sequence[Drafter] = (), gamma: int | None = None, may_pause: bool = False) -> None:
        self._drafters = tuple(drafters)
        self._gammas = GAMMAS if gamma is None else (gamma,)
        self._may_pause = may_pause
        self._steps = StepTimes()
        self._draft_times = {drafter.name: DraftTimes() for drafter in drafters}
        self._acceptance: dict[tuple[str, Hashable], Acceptance] = {}
        self._budget = LossBudget()
        self._cycle = 0
        self._plain_at = 0  # the last cycle that was a plain step
        self._kind: Hashable = None  # of the last draft
        self._guesses: list[tuple[Drafter, Hashable, int]] = []  # of free drafters, for a plain step

    def choose(self, sequence: TokenSequence, limit: int) -> tuple[Drafter | None, int]:
        """Return a drafter and how many tokens it should draft, at most `limit`; (None, 0) is a plain step.

        The first step is plain: the first token comes from the prompt's last row, which prefill has computed.
        """
        self._cycle += 1
        self._guesses = []
        if limit < 1 or self._cycle == 1 or (self._may_pause and self._needs_plain_step()):
            return None, 0
        best: tuple[float, Drafter | None, int] = (self._plain_rate(), None, 0)
        for drafter in self._drafters:
            kind = drafter.draft_kind(sequence)
            if kind is None:
                continue
            if drafter.relative_cost == 0:  # a draft costs nothing, and a plain step shows whether it was right
                self._guesses.append((drafter, kind, drafter.propose(sequence, 1).tokens[0]))
            gamma, rate = self._best_gamma(drafter, kind, limit)
            if rate > best[0]:
                best, self._kind = (rate, drafter, gamma), kind
        return best[1:]

    def observe(self, cycle: Cycle) -> None:
        """Update the estimates with the result of the last choice."""
        if self._cycle == 1:
            return  # the first step runs no model pass: its time is not representative
        cycle = self._without_outliers(cycle)
        self._steps.observe(cycle.drafted + 1, cycle.verify_s)
        if cycle.drafter is None:
            self._plain_at = self._cycle
            for drafter, kind, token in self._guesses:
                self._acceptance_of(drafter, kind).observe(self._cycle, 1, int(token == cycle.first))
        else:
            name = cycle.drafter.name
            self._draft_times[name].observe(cycle.drafted, cycle.draft_s)
            self._acceptance_of(cycle.drafter, self._kind).observe(self._cycle, cycle.drafted, cycle.accepted)
        if self._may_pause:
            self._budget.observe(cycle, self._steps.of(1))

    def acceptance(self, drafter: Drafter, kind: Hashable) -> Acceptance | None:
        """Return the measured acceptance of a drafter's drafts of a kind; None before the first one."""
        return self._acceptance.get((drafter.name, kind))

    def _without_outliers(self, cycle: Cycle) -> Cycle:
        """Return the cycle with its times clamped: a pause of the machine must not count against drafting."""
        if not self._steps.known:
            return cycle
        verify_s = min(cycle.verify_s, MAX_RATIO * self._steps.of(cycle.drafted + 1))
        draft_s = cycle.draft_s
        if cycle.drafter is not None and (times := self._draft_times[cycle.drafter.name]).known:
            draft_s = min(draft_s, MAX_RATIO * times.of(0.0) * cycle.drafted)
        return cycle._replace(draft_s=draft_s, verify_s=verify_s)

    def _needs_plain_step(self) -> bool:
        """Return whether the time of a plain step is unknown or out of date."""
        return 1 not in self._steps or self._cycle - self._plain_at > _PLAIN_EVERY

    def _plain_rate(self) -> float:
        return _MARGIN / self._steps.of(1) if self._may_pause else 0.0

    def _acceptance_of(self, drafter: Drafter, kind: Hashable) -> Acceptance:
        return self._acceptance.setdefault((drafter.name, kind), Acceptance(drafter.prior))

    def _best_gamma(self, drafter: Drafter, kind: Hashable, limit: int) -> tuple[int, float]:
        """Return the draft length with the most expected tokens a second, and that rate; 0 if none may be tried."""
        gammas = [gamma for gamma in self._gammas if gamma <= limit] or [limit]
        if not self._steps.known:
            return (gammas[0] if len(gammas) == 1 else min(4, limit)), 1.0
        acceptance = self._acceptance_of(drafter, kind).rate(self._cycle)
        plain = self._steps.of(1)
        per_token = self._draft_times[drafter.name].of(drafter.relative_cost * plain)
        times = {gamma: gamma * per_token + self._steps.of(gamma + 1) for gamma in gammas}
        rates = {
            gamma: expected_tokens(acceptance, gamma) / seconds
            for gamma, seconds in times.items()
            if not self._may_pause or self._budget.allows(seconds - plain, plain)
        }
        best = max(rates, key=rates.__getitem__, default=0)
        return best, rates.get(best, 0.0)
