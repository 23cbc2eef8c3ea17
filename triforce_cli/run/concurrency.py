"""How many sequences of a batch ran together."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Together:
    """How many sequences ran at a time, while one of them did: the mean over its time, and the most."""

    mean: float
    most: int


@dataclass(slots=True)
class _Span:
    began: float
    area: float  # sequences times seconds, until it began
    most: int


class Concurrency:
    """Counts the sequences that run, from when each enters until it leaves."""

    def __init__(self) -> None:
        self._running: dict[Hashable, _Span] = {}
        self._at = time.perf_counter()
        self._area = self._busy = 0.0  # sequences times seconds, and seconds with any
        self._most = 0

    def __len__(self) -> int:
        return len(self._running)

    def enter(self, key: Hashable) -> None:
        """Count a sequence from now on."""
        now = self._advance()
        self._running[key] = _Span(now, self._area, 0)
        for span in self._running.values():
            span.most = max(span.most, len(self._running))
        self._most = max(self._most, len(self._running))

    def leave(self, key: Hashable) -> Together:
        """Count a sequence no longer; return what ran beside it, itself included."""
        now = self._advance()
        span = self._running.pop(key)
        return Together(_mean(self._area - span.area, now - span.began, span.most), span.most)

    def overall(self) -> Together:
        """Return how many have run so far, while any did."""
        self._advance()
        return Together(_mean(self._area, self._busy, self._most), self._most)

    def _advance(self) -> float:
        now = time.perf_counter()
        self._area += len(self._running) * (now - self._at)
        self._busy += bool(self._running) * (now - self._at)
        self._at = now
        return now


def _mean(area: float, seconds: float, most: int) -> float:
    return area / seconds if seconds > 0 else float(most)
