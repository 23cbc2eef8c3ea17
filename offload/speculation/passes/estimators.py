"""Online estimates for the scheduler: the times of passes by rows, and expected tokens."""

from bisect import bisect, insort

MAX_RATIO = 2.0  # a measured time counts up to this multiple of its estimate: above, the machine was interrupted
ATTENTION_COST = 1.3  # the time to read a byte of KV, relative to a byte of weights: measured on CPUs
ROW_COST = 0.15  # prior: the time of each further row of a verification, relative to one row
_RELAX = 0.02  # of the difference to its prior, which the time of a draft loses in a cycle
_SLOPE_WEIGHT = 8.0  # of the prior time of a further row, in squared rows: one measurement of a few rows replaces it
_HOPE = 0.2  # of the prior time of a further row, where trees may have many: to try a size shows its truth at once
_TRUST = 4  # times the rows of the largest measured pass are considered; the next measurement allows more
_LEAST_ROWS = 8  # that are considered before anything is measured


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Return the tokens per verification: 1 + a + ... + a^gamma (Leviathan et al., arXiv 2211.17192, equation 1)."""
    return float(gamma + 1) if acceptance >= 1 else (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


class StepTimes:
    """Seconds of a step by its number of rows: moving averages, interpolated linearly between measured sizes.

    Beyond them it is a line, whose slope is that of the measured sizes; the fewer rows they differ by, the more it is
    the prior's.
    """

    def __init__(self, row_cost: float = ROW_COST, for_trees: bool = False) -> None:
        """`row_cost` is the expected time of each further row, relative to one row."""
        self._row_cost = _HOPE * row_cost if for_trees else row_cost
        self._known: dict[int, float] = {}
        self._count: dict[int, int] = {}
        self._sizes: list[int] = []  # of the measured steps, in rows, sorted
        self._slope_s: float | None = None  # between two observations: every choice asks for many sizes

    @property
    def known(self) -> bool:
        """Whether any step was measured."""
        return bool(self._known)

    def __contains__(self, rows: int) -> bool:
        return rows in self._known

    @property
    def most_rows(self) -> int:
        """The largest number of rows about which the measurements say something."""
        return max(_LEAST_ROWS, _TRUST * self._sizes[-1]) if self._sizes else _LEAST_ROWS

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
        """Count a step of `rows` that took `seconds`; a first one of a size that is faster than expected, at once.

        Any other may include the set-up for its size, or a pause of the machine: its influence is bounded.
        """
        seconds, is_new = max(seconds, 1e-9), rows not in self._known
        guess = self.of(rows) if self._known else seconds
        self._slope_s = None
        if is_new:
            insort(self._sizes, rows)
        count = self._count[rows] = self._count.get(rows, 0) + 1
        if is_new and seconds <= guess:
            self._known[rows] = seconds
            return
        ratio = min(max(seconds / guess, 1 / MAX_RATIO), MAX_RATIO)
        drift = ratio**0.02  # a machine that slows down does so for every size
        self._known = {size: value * drift for size, value in self._known.items()}
        weight = 0.7 if is_new else max(0.1, 1 / (count + 1))
        self._known[rows] = guess * (1 + weight * (ratio - 1))

    def relax(self, guess: float) -> None:
        """Let estimates above `guess` seconds for one row decay to it: a draft that was slow once is tried again."""
        if self._known and (now := self.of(1)) > guess > 0:
            factor = 1 - _RELAX * (1 - guess / now)
            self._known = {rows: seconds * factor for rows, seconds in self._known.items()}
            self._slope_s = None

    def _slope(self) -> float:
        """Return the seconds of a further row: least squares over the measured sizes, and the prior as one more."""
        smallest = self._sizes[0]
        prior = self._row_cost * self._known[smallest] / (1 + self._row_cost * (smallest - 1))
        mean_rows = sum(self._sizes) / len(self._sizes)
        mean_s = sum(self._known.values()) / len(self._sizes)
        offsets = [(rows - mean_rows, self._known[rows] - mean_s) for rows in self._sizes]
        product = sum(rows * seconds for rows, seconds in offsets)
        return max((_SLOPE_WEIGHT * prior + product) / (_SLOPE_WEIGHT + sum(rows**2 for rows, _ in offsets)), 0.0)
