"""What the scheduler knows of each drafter, and what a draft of a length is expected to cost and to yield."""

from __future__ import annotations

from collections.abc import Hashable

from ..sequence import TokenSequence
from .drafter import Drafter
from .estimators import Acceptance, DraftTimes, SetupTimes, StepTimes, expected_tokens

GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)


class Arm:
    """The estimates of one drafter: its time per token, its one-off costs, and the acceptance of each kind of draft."""

    def __init__(self, drafter: Drafter, steps: StepTimes, gamma: int | None = None) -> None:
        """`steps` are the times of the verifications. With `gamma`, drafts have that length."""
        self.drafter, self.steps = drafter, steps
        self.times, self.setups = DraftTimes(), SetupTimes()
        self.acceptance: dict[Hashable, Acceptance] = {}
        self._gammas = GAMMAS if gamma is None else (gamma,)

    @property
    def token_s(self) -> float:
        """The estimated seconds per drafted token."""
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
        acceptance = self.acceptance.setdefault(kind, Acceptance(self.drafter.prior))
        gammas = [gamma for gamma in self._gammas if gamma < limit]
        if len(gammas) < len(self._gammas):  # near the end: the last draft can be as long as the rest of the answer
            gammas.append(limit)
        guess = self.drafter.setup_cost(sequence) * self.steps.of(1)
        times = {gamma: gamma * self.token_s + self.steps.of(gamma + 1) for gamma in gammas}
        believed = acceptance.rate(cycle, shift), acceptance.spread(cycle, shift)
        return Candidate(self, acceptance, believed, times, guess)


class Candidate:
    """A drafter's kind of draft at one choice.

    Attributes:
        acceptance: the estimate that the draft's verification updates.
        gamma: the draft length that was chosen.
        rate, spread: the believed acceptance rate, and the standard deviation of that belief.
        seconds: the expected time of a cycle by draft length, without one-off costs.
        setup_guess, setup_s: the estimated one-off cost of the next draft, as the drafter and as measurements have it.
    """

    def __init__(
        self,
        arm: Arm,
        acceptance: Acceptance,
        believed: tuple[float, float],
        seconds: dict[int, float],
        setup_guess: float,
    ) -> None:
        self.arm, self.acceptance = arm, acceptance
        self.rate, self.spread = believed
        self.seconds, self.gamma, self.setup_guess = seconds, 0, setup_guess
        self.setup_s = arm.setups.of(setup_guess)

    def fastest(self, acceptance: float, most_s: float = float("inf")) -> tuple[float, int]:
        """Return the fewest seconds a token at an acceptance rate, and the draft length; 0 if none is allowed.

        Only lengths whose cycles take at most `most_s` seconds are allowed.
        """
        best = (float("inf"), 0)
        for gamma, seconds in self.seconds.items():
            if seconds <= most_s:
                best = min(best, (seconds / expected_tokens(acceptance, gamma), gamma))
        return best

    @property
    def low_s(self) -> float:
        """The fewest seconds a token if the acceptance rate is lower than believed, by a standard deviation."""
        return self.fastest(max(self.rate - self.spread, 0.0))[0]
