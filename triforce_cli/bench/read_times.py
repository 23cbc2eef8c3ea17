"""In how many seconds a prompt is read whose beginning was read before. Imports no torch."""

from itertools import pairwise
from typing import NamedTuple

from offload.metrics import Meter


class Read(NamedTuple):
    """A read that has ended: the tokens that were there before, all of them with these, and the seconds."""

    cached_tokens: int
    prefilled_tokens: int
    prefill_s: float | None


class ReadTimes:
    """In how many seconds the beginnings of a prompt were read, of reads that each go on from a shorter prompt."""

    def __init__(self) -> None:
        self._points = [(0, 0.0)]  # tokens, and the seconds in which all of them were read

    def add(self, meter: Meter | Read) -> float:
        """Note a read that has ended; return the seconds of all of its tokens, also of those that were there before."""
        cached, tokens = meter.cached_tokens, meter.prefilled_tokens
        before = self._at(cached)
        self._points = [point for point in self._points if point[0] < cached]
        self._points += [(cached, before), (tokens, before + (meter.prefill_s or 0.0))]
        return self._points[-1][1]

    def knows(self, tokens: int) -> bool:
        """Return whether so many tokens were read among the reads that were noted."""
        return tokens <= self._points[-1][0]

    def _at(self, tokens: int) -> float:
        """Return the seconds of so many tokens: between two reads in proportion."""
        for (low, start), (high, end) in pairwise(self._points):
            if low <= tokens <= high:
                return start + (end - start) * (tokens - low) / max(high - low, 1)
        return self._points[-1][1]
