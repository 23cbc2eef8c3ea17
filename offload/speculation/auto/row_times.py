"""Measured times of passes by their rows, for trees: unlike chains, they ask about sizes far beyond those measured."""

from __future__ import annotations

from bisect import insort

from ..passes.estimators import ROW_COST, StepTimes

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
            self._known[rows], self._count[rows] = max(seconds, 1e-9), 1
        else:
            super().observe(rows, seconds)
