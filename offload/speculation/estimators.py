"""What speculation costs and what it brings, measured while it runs: step times, acceptance, expected tokens."""

from __future__ import annotations

BELIEVED = 2.0  # times what it was taken for: longer than that a step only takes when the machine has a hiccup
_SLOPE = 0.2  # what each further row of a verification is taken to cost, relative to one row, until measured


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Tokens per verification: 1 + a + ... + a^gamma (Leviathan et al., arXiv 2211.17192, equation 1)."""
    return float(gamma + 1) if acceptance >= 1 else (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


class Acceptance:
    """The moving probability that a drafted token is accepted. What was seen long ago counts less and less."""

    def __init__(self, prior: float, weight: float = 2.0, keep: float = 0.98) -> None:
        self._prior, self._weight, self._keep = prior, weight, keep
        self._accepted = self._judged = 0.0
        self._seen = 0  # the cycle up to which both have been aged

    def rate(self, cycle: int) -> float:
        """The estimate at a cycle; without news it goes back to the prior, so that what failed is tried again."""
        self._age(cycle)
        return (self._accepted + self._prior * self._weight) / (self._judged + self._weight)

    def observe(self, cycle: int, drafted: int, accepted: int) -> None:
        """The tokens behind a rejected one were never judged."""
        self._age(cycle)
        self._accepted += accepted
        self._judged += min(accepted + 1, drafted)
        if self._judged > 32:  # a longer memory would follow a change of text too slowly
            self._accepted, self._judged = self._accepted * 32 / self._judged, 32.0

    def _age(self, cycle: int) -> None:
        kept = self._keep ** (cycle - self._seen)
        self._accepted *= kept
        self._judged *= kept
        self._seen = cycle


class StepTimes:
    """Seconds that a step over so many rows takes: moving averages, and straight lines between them."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}
        self._count: dict[int, int] = {}

    @property
    def known(self) -> bool:
        return bool(self._known)

    def __contains__(self, rows: int) -> bool:
        return rows in self._known

    def of(self, rows: int) -> float:
        """The estimate; something must have been observed."""
        if rows in self._known:
            return self._known[rows]
        below = max((n for n in self._known if n < rows), default=None)
        above = min((n for n in self._known if n > rows), default=None)
        if below is not None and above is not None:
            share = (rows - below) / (above - below)
            return self._known[below] * (1 - share) + self._known[above] * share
        nearest = below if below is not None else above
        return self._known[nearest] * (1 + _SLOPE * (rows - 1)) / (1 + _SLOPE * (nearest - 1))

    def observe(self, rows: int, seconds: float) -> None:
        """A step has taken so long."""
        count = self._count[rows] = self._count.get(rows, 0) + 1
        if not self._known:
            self._known[rows] = max(seconds, 1e-9)
            return
        guess = self.of(rows)
        # The first step of a size may pay for its set-up, and a busy machine for others: no single one is believed.
        ratio = min(max(seconds / guess, 1 / BELIEVED), BELIEVED)
        drift = ratio**0.02  # a machine that slows down does so for every size
        self._known = {n: value * drift for n, value in self._known.items()}
        weight = 0.7 if count == 1 else max(0.1, 1 / (count + 1))
        self._known[rows] = guess * (1 + weight * (ratio - 1))


class DraftTimes:
    """Seconds that a drafter takes for each token. The first draft is not counted: it pays for setting up."""

    def __init__(self) -> None:
        self._per_token: float | None = None
        self._first = True

    @property
    def known(self) -> bool:
        return self._per_token is not None

    def of(self, guess: float) -> float:
        """Seconds a token; the guess as long as nothing is known."""
        return guess if self._per_token is None else self._per_token

    def observe(self, tokens: int, seconds: float) -> None:
        """A draft of so many tokens has taken so long."""
        if self._first:
            self._first = False
            return
        sample = seconds / tokens
        self._per_token = sample if self._per_token is None else self._per_token + 0.3 * (sample - self._per_token)
