"""Measured times of passes by their rows, for trees: unlike chains, they ask about sizes far beyond those measured."""

from __future__ import annotations

from bisect import insort

from .estimators import ROW_COST, StepTimes

_TRUST = 4  # times the rows of the largest measured pass are considered; the next measurement allows more
_LEAST_ROWS = 8  # that are considered before anything is measured
_HOPE = 0.25  # of the prior cost of a row, while one size is measured: to try another one shows the truth


class RowTimes(StepTimes):
    """Seconds of a pass by rows, interpolated between measured sizes, and a line beyond them.

    The line's slope is that between the smallest and the largest measured size. Over a slow link it is nearly flat.
    """

    @property
    def most_rows(self) -> int:
        """The largest number of rows about which the measurements say something."""
        return max(_LEAST_ROWS, _TRUST * self._sizes[-1]) if self._sizes else _LEAST_ROWS

    def of(self, rows: int) -> float:
        if not self._known or self._sizes[0] <= rows <= self._sizes[-1]:
            return super().of(rows)
        nearest = self._sizes[0 if rows < self._sizes[0] else -1]
        line = self._known[nearest] + self._slope() * (rows - nearest)
        return max(line, self._known[nearest] * min(rows / nearest, 1.0))

    def observe(self, rows: int, seconds: float) -> None:
        """Count a pass of `rows` that took `seconds`; the first of a size, if it was faster than expected, at once."""
        if self._known and rows not in self._known and seconds < self.of(rows):
            insort(self._sizes, rows)
            self._known[rows], self._count[rows] = max(seconds, 1e-9), 1
        else:
            super().observe(rows, seconds)

    def _slope(self) -> float:
        small, large = self._sizes[0], self._sizes[-1]
        if small == large:
            return _HOPE * ROW_COST * self._known[small] / (1 + ROW_COST * (small - 1))
        return max((self._known[large] - self._known[small]) / (large - small), 0.0)
