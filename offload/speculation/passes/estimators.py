"""Online estimates for the scheduler: step times, draft times, acceptance rates, and expected tokens."""

from bisect import bisect, insort

MAX_RATIO = 2.0  # a measured time counts up to this multiple of its estimate: above, the machine was interrupted
ATTENTION_COST = 1.3  # the time to read a byte of KV, relative to a byte of weights: measured on CPUs
ROW_COST = 0.15  # prior: the time of each further row of a verification, relative to one row
_MEMORY = 32.0  # verified tokens of an acceptance rate
_RELAX = 0.02  # of the difference to its prior, which the time of a draft loses in a cycle
_SLOPE_WEIGHT = 8.0  # of the prior time of a further row, in squared rows: one measurement of a few rows replaces it


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Return the tokens per verification: 1 + a + ... + a^gamma (Leviathan et al., arXiv 2211.17192, equation 1)."""
    return float(gamma + 1) if acceptance >= 1 else (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


def token_rate(accepted_of_drafted: float, gamma: int) -> float:
    """Return the acceptance rate a token with which so large a share of drafts of `gamma` tokens is accepted.

    The inverse of (expected_tokens(a, gamma) - 1) / gamma, which rises with a, by bisection.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        below = expected_tokens(middle, gamma) - 1 < accepted_of_drafted * gamma
        low, high = (middle, high) if below else (low, middle)
    return high


class Acceptance:
    """A moving average of the probability that a drafted token is accepted; old observations decay."""

    def __init__(self, prior: float, weight: float = 2.0, keep: float = 0.98) -> None:
        self._prior, self._weight, self._keep = prior, weight, keep
        self._accepted = self.verified = 0.0  # tokens behind the estimate, decayed
        self._decayed_to = 0  # the cycle up to which both have decayed

    def rate(self, cycle: int, shift: float = 0.0) -> float:
        """Return the estimate at a cycle. It decays to the prior, so that drafting is tried again.

        `shift` is added to the prior: what other drafters have shown of the text.
        """
        self._decay(cycle)
        prior = min(max(self._prior + shift, 0.0), 1.0)
        return (self._accepted + prior * self._weight) / (self.verified + self._weight)

    def surprise(self, cycle: int) -> float:
        """Return by how much the estimate differs from the prior."""
        return self.rate(cycle) - self._prior

    def observe(self, cycle: int, drafted: int, accepted: int) -> None:
        """Count a verification. Tokens after the first rejected one were not verified."""
        self.count(cycle, min(accepted + 1, drafted), accepted)

    def count(self, cycle: int, verified: int, accepted: int) -> None:
        """Count verified tokens, and how many of them were accepted."""
        self._decay(cycle)
        self._accepted += accepted
        self.verified += verified
        if self.verified > _MEMORY:  # a longer memory would follow a change of text too slowly
            self._accepted, self.verified = self._accepted * _MEMORY / self.verified, _MEMORY

    def spread(self, cycle: int, shift: float = 0.0) -> float:
        """Return the standard deviation of the belief at a cycle, as of a beta distribution."""
        rate = self.rate(cycle, shift)
        return (rate * (1 - rate) / (self.verified + self._weight + 1)) ** 0.5

    def _decay(self, cycle: int) -> None:
        factor = self._keep ** (cycle - self._decayed_to)
        self._accepted *= factor
        self.verified *= factor
        self._decayed_to = cycle


class StepTimes:
    """Seconds of a step by its number of rows: moving averages, interpolated linearly between measured sizes.

    Beyond them it is a line, whose slope is that of the measured sizes; the less they tell, the more it is the prior's.
    """

    def __init__(self, row_cost: float = ROW_COST) -> None:
        """`row_cost` is the expected time of each further row, relative to one row."""
        self._row_cost = row_cost
        self._known: dict[int, float] = {}
        self._count: dict[int, int] = {}
        self._sizes: list[int] = []  # of the measured steps, in rows, sorted
        self._slope_s: float | None = None  # between two observations: every choice asks for many sizes

    @property
    def known(self) -> bool:
        return bool(self._known)

    def __contains__(self, rows: int) -> bool:
        return rows in self._known

    def of(self, rows: int) -> float:
        """Return the estimate for `rows`; in plain steps, not in seconds, before the first observation."""
        if not self._known:
            return 1 + self._row_cost * (rows - 1)
        if rows in self._known:
            return self._known[rows]
        index = bisect(self._sizes, rows)
        if 0 < index < len(self._sizes):
            below, above = self._sizes[index - 1 : index + 1]
            share = (rows - below) / (above - below)
            return self._known[below] * (1 - share) + self._known[above] * share
        nearest = self._sizes[0 if index == 0 else -1]
        if self._slope_s is None:
            self._slope_s = self._slope()
        line = self._known[nearest] + self._slope_s * (rows - nearest)
        return max(line, self._known[nearest] * min(rows / nearest, 1.0))

    def observe(self, rows: int, seconds: float) -> None:
        """Count a step of `rows` that took `seconds`."""
        count = self._count[rows] = self._count.get(rows, 0) + 1
        guess = self.of(rows) if self._known else None
        self._slope_s = None
        if count == 1:
            insort(self._sizes, rows)
        if guess is None:
            self._known[rows] = max(seconds, 1e-9)
            return
        # A single step may include the set-up for its size, or a pause of the machine: its influence is bounded.
        ratio = min(max(seconds / guess, 1 / MAX_RATIO), MAX_RATIO)
        drift = ratio**0.02  # a machine that slows down does so for every size
        self._known = {n: value * drift for n, value in self._known.items()}
        weight = 0.7 if count == 1 else max(0.1, 1 / (count + 1))
        self._known[rows] = guess * (1 + weight * (ratio - 1))

    def _slope(self) -> float:
        """Return the seconds of a further row: least squares over the measured sizes, and the prior as one more."""
        smallest = self._sizes[0]
        prior = self._row_cost * self._known[smallest] / (1 + self._row_cost * (smallest - 1))
        mean_rows = sum(self._sizes) / len(self._sizes)
        mean_s = sum(self._known.values()) / len(self._sizes)
        offsets = [(rows - mean_rows, self._known[rows] - mean_s) for rows in self._sizes]
        product = sum(rows * seconds for rows, seconds in offsets)
        return max((_SLOPE_WEIGHT * prior + product) / (_SLOPE_WEIGHT + sum(rows**2 for rows, _ in offsets)), 0.0)


class DraftTimes:
    """Seconds per drafted token, a moving average. The first draft is not counted: it may include allocations."""

    def __init__(self) -> None:
        self._per_token: float | None = None
        self._most = float("inf")
        self._first = True

    @property
    def known(self) -> bool:
        return self._per_token is not None

    def of(self, guess: float) -> float:
        """Return seconds per token; `guess`, or less if that was too much, before the first measurement."""
        return min(guess, self._most) if self._per_token is None else self._per_token

    def relax(self, guess: float) -> None:
        """Let an estimate above `guess` decay to it: drafts that were slow once are tried again."""
        if self._per_token is not None and self._per_token > guess:
            self._per_token += _RELAX * (guess - self._per_token)

    def limit(self, tokens: int, seconds: float) -> None:
        """Note that a draft of `tokens` and a one-off cost took `seconds` together."""
        self._first = False
        self._most = min(self._most, seconds / tokens)

    def observe(self, tokens: int, seconds: float) -> None:
        """Count a draft of `tokens` that took `seconds`."""
        if self._first:
            self._first = False
            return
        sample = seconds / tokens
        self._per_token = sample if self._per_token is None else self._per_token + 0.3 * (sample - self._per_token)


class SetupTimes:
    """Seconds of a drafter's one-off costs: estimates, multiplied by the ratio that was measured last."""

    _MAX = 10.0  # an estimate is corrected by this factor at most: what was measured may be a pause of the machine

    def __init__(self) -> None:
        self._ratio = 1.0
        self.count = 0  # of measurements

    def of(self, guess: float) -> float:
        """Return seconds for an estimate."""
        return self._ratio * guess

    def observe(self, guess: float, seconds: float) -> None:
        """Count a one-off cost that was estimated as `guess` and took `seconds`."""
        self.count += 1
        if guess > 0:
            self._ratio = min(max(seconds / guess, 1 / self._MAX), self._MAX)


_TRUST = 4  # times the rows of the largest measured pass are considered; the next measurement allows more
_LEAST_ROWS = 8  # that are considered before anything is measured
_HOPE = 0.2  # of the prior cost of a row


class RowTimes(StepTimes):
    """Seconds of a pass by rows as of `StepTimes`, with a lower prior: to try a size shows its truth at once."""

    def __init__(self, row_cost: float = ROW_COST) -> None:
        super().__init__(_HOPE * row_cost)

    @property
    def most_rows(self) -> int:
        """The largest number of rows about which the measurements say something."""
        return max(_LEAST_ROWS, _TRUST * self._sizes[-1]) if self._sizes else _LEAST_ROWS

    def observe(self, rows: int, seconds: float) -> None:
        """Count a pass of `rows` that took `seconds`; the first of a size, if it was faster than expected, at once."""
        if self._known and rows not in self._known and seconds < self.of(rows):
            insort(self._sizes, rows)
            self._known[rows], self._count[rows], self._slope_s = max(seconds, 1e-9), 1, None
        else:
            super().observe(rows, seconds)
