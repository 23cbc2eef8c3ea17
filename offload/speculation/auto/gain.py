"""The gain of speculation over plain decoding, measured by the plain steps among it, and the bound on its loss."""

from ...events import Gain
from .cycle import Cycle

_LEAST_STEPS = 2  # plain steps that have to be measured: one alone may be a pause of the machine


class GainMeter:
    """Adds up the seconds of the cycles, and those that plain decoding would have taken for the same tokens.

    A plain step counts alike on both sides, so that an answer without drafts gains exactly nothing. The tokens of a
    draft's verification are priced at the estimated time of a plain step; those emitted before one is measured, as
    soon as it is.
    """

    def __init__(self) -> None:
        self._seconds = self._plain_s = 0.0
        self._unpriced = 0  # tokens
        self._steps = 0  # plain ones
        self._step_s = 0.0

    def observe(self, cycle: Cycle, step_s: float | None) -> None:
        """Count a cycle with all of its time; `step_s` are the seconds of a plain step, None before one was run."""
        seconds = cycle.draft_s + cycle.verify_s
        self._seconds += seconds
        if cycle.drafter is None:
            self._steps += 1
            self._plain_s += seconds
        else:
            self._unpriced += cycle.accepted + 1
        if step_s is not None:
            self._plain_s += self._unpriced * step_s
            self._unpriced, self._step_s = 0, step_s

    @property
    def gain(self) -> Gain | None:
        """The gain so far; None where too few plain steps were run to compare with."""
        if self._steps < _LEAST_STEPS or self._seconds <= 0:
            return None
        return Gain(self._seconds, self._plain_s, self._step_s)


SHARE = 0.025  # of the decoding time, which rejected drafts may take
_START, _MOST = 2.0, 16.0  # plain steps that may be lost at first, and at most, after gains


class LossBudget:
    """The seconds that rejected drafts may cost: a share of the time, and the gains so far over plain steps.

    A failed trial postpones the next one until the share of the time has repaid it.
    """

    def __init__(self) -> None:
        self._credit: float | None = None  # seconds

    def most_s(self, plain: float) -> float:
        """Return the most seconds that a cycle may take, because all of its draft may be rejected."""
        return plain + self._available(plain)

    def observe(self, drafted: bool, emitted: int, seconds: float, plain: float) -> None:
        """Book a cycle that emitted some tokens in so many seconds; a plain step takes `plain`, and loses nothing."""
        gain = plain * emitted - seconds if drafted else 0.0
        self._credit = min(max(self._available(plain) + SHARE * seconds + gain, -plain), _MOST * plain)

    def _available(self, plain: float) -> float:
        return _START * plain if self._credit is None else self._credit
