"""Online estimates for the scheduler: step times, draft times, acceptance rates, and expected tokens."""

from __future__ import annotations

MAX_RATIO = 2.0  # a measured time counts up to this multiple of its estimate: above, the machine was interrupted
_ROW_COST = 0.2  # prior: the time of each further row of a verification, relative to one row


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Return the tokens per verification: 1 + a + ... + a^gamma (Leviathan et al., arXiv 2211.17192, equation 1)."""
    return float(gamma + 1) if acceptance >= 1 else (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


class Acceptance:
    """A moving average of the probability that a drafted token is accepted; old observations decay."""

    def __init__(self, prior: float, weight: float = 2.0, keep: float = 0.98) -> None:
        self._prior, self._weight, self._keep = prior, weight, keep
        self._accepted = self._judged = 0.0
        self._decayed_to = 0  # the cycle up to which both have decayed

    def rate(self, cycle: int) -> float:
        """Return the estimate at a cycle. It decays to the prior, so that drafting is tried again."""
        self._decay(cycle)
        return (self._accepted + self._prior * self._weight) / (self._judged + self._weight)

    def observe(self, cycle: int, drafted: int, accepted: int) -> None:
        """Count a verification. Tokens after the first rejected one were not verified."""
        self._decay(cycle)
        self._accepted += accepted
        self._judged += min(accepted + 1, drafted)
        if self._judged > 32:  # a longer memory would follow a change of text too slowly
            self._accepted, self._judged = self._accepted * 32 / self._judged, 32.0

    @property
    def verified(self) -> float:
        """The number of verified tokens behind the estimate, decayed."""
        return self._judged

    def _decay(self, cycle: int) -> None:
        factor = self._keep ** (cycle - self._decayed_to)
        self._accepted *= factor
        self._judged *= factor
        self._decayed_to = cycle


class StepTimes:
    """Seconds of a step by its number of rows: moving averages, interpolated linearly between measured sizes."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}
        self._count: dict[int, int] = {}

    @property
    def known(self) -> bool:
        return bool(self._known)

    def __contains__(self, rows: int) -> bool:
        return rows in self._known

    def of(self, rows: int) -> float:
        """Return the estimate for `rows`. At least one step must have been observed."""
        if rows in self._known:
            return self._known[rows]
        below = max((n for n in self._known if n < rows), default=None)
        above = min((n for n in self._known if n > rows), default=None)
        if below is not None and above is not None:
            share = (rows - below) / (above - below)
            return self._known[below] * (1 - share) + self._known[above] * share
        nearest = below if below is not None else above
        return self._known[nearest] * (1 + _ROW_COST * (rows - 1)) / (1 + _ROW_COST * (nearest - 1))

    def observe(self, rows: int, seconds: float) -> None:
        """Count a step of `rows` that took `seconds`."""
        count = self._count[rows] = self._count.get(rows, 0) + 1
        if not self._known:
            self._known[rows] = max(seconds, 1e-9)
            return
        guess = self.of(rows)
        # A single step may include the set-up for its size, or a pause of the machine: its influence is bounded.
        ratio = min(max(seconds / guess, 1 / MAX_RATIO), MAX_RATIO)
        drift = ratio**0.02  # a machine that slows down does so for every size
        self._known = {n: value * drift for n, value in self._known.items()}
        weight = 0.7 if count == 1 else max(0.1, 1 / (count + 1))
        self._known[rows] = guess * (1 + weight * (ratio - 1))


class DraftTimes:
    """Seconds per drafted token, a moving average. The first draft is not counted: it includes the set-up."""

    def __init__(self) -> None:
        self._per_token: float | None = None
        self._first = True

    @property
    def known(self) -> bool:
        return self._per_token is not None

    def of(self, guess: float) -> float:
        """Return seconds per token; `guess` before the first measurement."""
        return guess if self._per_token is None else self._per_token

    def observe(self, tokens: int, seconds: float) -> None:
        """Count a draft of `tokens` that took `seconds`."""
        if self._first:
            self._first = False
            return
        sample = seconds / tokens
        self._per_token = sample if self._per_token is None else self._per_token + 0.3 * (sample - self._per_token)
