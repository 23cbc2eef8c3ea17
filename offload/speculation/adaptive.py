"""Who drafts next, and how much: the choice that promises the most tokens a second, at each level of speculation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ..sequence import TokenSequence
from .drafter import Drafter
from .estimators import BELIEVED, Acceptance, DraftTimes, StepTimes, expected_tokens

GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
_MARGIN = 1.05  # times plain decoding's rate is what drafting must promise: less may be noise
_PLAIN_EVERY = 24  # cycles; without a plain step now and then, nothing is known of what speculation competes with
_SHARE = 0.03  # of the time may be lost on drafts that fail
_CAP = 16  # plain steps; more of its gains speculation may not lose again


class Cycle(NamedTuple):
    """One draft and its verification; no drafter where there was no draft. `first` of the tokens that came out.

    Times in seconds.
    """

    drafter: Drafter | None
    first: int
    drafted: int
    accepted: int
    draft_s: float
    verify_s: float


class Ledger:
    """What speculation has gained and lost against plain steps: it may lose its gains and a small share of the time."""

    def __init__(self) -> None:
        self._credit: float | None = None  # seconds

    def allows(self, loss: float, plain: float) -> bool:
        """Whether a draft may be tried that would lose so many seconds if nothing of it were accepted."""
        return loss <= (plain if self._credit is None else self._credit)

    def enter(self, cycle: Cycle, plain: float) -> None:
        """Book a cycle, where a plain step takes `plain` seconds."""
        seconds = cycle.draft_s + cycle.verify_s
        credit = plain if self._credit is None else self._credit
        credit += _SHARE * seconds
        if cycle.drafter is not None:
            credit += plain * (cycle.accepted + 1) - seconds
        self._credit = min(credit, _CAP * plain)


class AdaptiveScheduler:
    """Chooses among drafters and draft lengths from measured times and moving acceptance.

    Args:
        drafters: to choose from; none is plain decoding.
        gamma: a fixed draft length, or None for the one that promises most.
        rests: whether plain steps are a choice too. Then failed drafts never cost more than a few percent of the time.
    """

    def __init__(self, drafters: Sequence[Drafter] = (), gamma: int | None = None, rests: bool = False) -> None:
        self._drafters = tuple(drafters)
        self._gammas = GAMMAS if gamma is None else (gamma,)
        self._rests = rests
        self._steps = StepTimes()
        self._draft_times = {drafter.name: DraftTimes() for drafter in drafters}
        self._acceptance: dict[tuple[str, Hashable], Acceptance] = {}
        self._ledger = Ledger()
        self._cycle = 0
        self._plain_at = 0  # the last cycle that was a plain step
        self._outlook: Hashable = None
        self._bets: list[tuple[Drafter, Hashable, int]] = []  # what drafters would have said where none was asked

    def choose(self, sequence: TokenSequence, limit: int) -> tuple[Drafter | None, int]:
        """A drafter, and how many tokens to ask it for, at most `limit`; (None, 0) is a plain step.

        The first step is plain: the first token comes from the prompt's last row, which is there already.
        """
        self._cycle += 1
        self._bets = []
        if limit < 1 or self._cycle == 1 or (self._rests and self._must_rest()):
            return None, 0
        best: tuple[float, Drafter | None, int] = (self._plain_rate(), None, 0)
        for drafter in self._drafters:
            outlook = drafter.outlook(sequence)
            if outlook is None:
                continue
            if drafter.share == 0:  # asking costs nothing, and a plain step will tell whether it was right
                self._bets.append((drafter, outlook, drafter.propose(sequence, 1).tokens[0]))
            gamma, rate = self._best_gamma(drafter, outlook, limit)
            if rate > best[0]:
                best, self._outlook = (rate, drafter, gamma), outlook
        return best[1:]

    def observe(self, cycle: Cycle) -> None:
        """What came of the last choice."""
        if self._cycle == 1:
            return  # its time says nothing about the following ones
        cycle = self._believed(cycle)
        self._steps.observe(cycle.drafted + 1, cycle.verify_s)
        if cycle.drafter is None:
            self._plain_at = self._cycle
            for drafter, outlook, token in self._bets:
                self._accepted(drafter, outlook).observe(self._cycle, 1, int(token == cycle.first))
        else:
            name = cycle.drafter.name
            self._draft_times[name].observe(cycle.drafted, cycle.draft_s)
            self._accepted(cycle.drafter, self._outlook).observe(self._cycle, cycle.drafted, cycle.accepted)
        if self._rests:
            self._ledger.enter(cycle, self._steps.of(1))

    def _believed(self, cycle: Cycle) -> Cycle:
        """The cycle without a hiccup of the machine: that is nobody's fault, and must not count against drafting."""
        if not self._steps.known:
            return cycle
        verify_s = min(cycle.verify_s, BELIEVED * self._steps.of(cycle.drafted + 1))
        draft_s = cycle.draft_s
        if cycle.drafter is not None and (times := self._draft_times[cycle.drafter.name]).known:
            draft_s = min(draft_s, BELIEVED * times.of(0.0) * cycle.drafted)
        return cycle._replace(draft_s=draft_s, verify_s=verify_s)

    def _must_rest(self) -> bool:
        return 1 not in self._steps or self._cycle - self._plain_at > _PLAIN_EVERY

    def _plain_rate(self) -> float:
        return _MARGIN / self._steps.of(1) if self._rests else 0.0

    def _accepted(self, drafter: Drafter, outlook: Hashable) -> Acceptance:
        return self._acceptance.setdefault((drafter.name, outlook), Acceptance(drafter.prior))

    def _best_gamma(self, drafter: Drafter, outlook: Hashable, limit: int) -> tuple[int, float]:
        """The draft length with the most expected tokens a second, and that rate; 0 if none may be tried."""
        gammas = [gamma for gamma in self._gammas if gamma <= limit] or [limit]
        if not self._steps.known:
            return (gammas[0] if len(gammas) == 1 else min(4, limit)), 1.0
        acceptance = self._accepted(drafter, outlook).rate(self._cycle)
        plain = self._steps.of(1)
        each = self._draft_times[drafter.name].of(drafter.share * plain)
        times = {gamma: gamma * each + self._steps.of(gamma + 1) for gamma in gammas}
        rates = {
            gamma: expected_tokens(acceptance, gamma) / seconds
            for gamma, seconds in times.items()
            if not self._rests or self._ledger.allows(seconds - plain, plain)
        }
        best = max(rates, key=rates.__getitem__, default=0)
        return best, rates.get(best, 0.0)
