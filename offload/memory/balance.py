"""The split of a layer's pages between the link and host attention, chosen so that both finish together."""

from __future__ import annotations

import time

HOST_ROWS = 64  # tokens of a pass that the host of a GPU shares: for more, attention is bound by arithmetic
_SMOOTHING = 0.8  # weight of the old average when a new time is measured


class Balance:
    """The split between link and host, from times measured while running.

    `share` is the host's fraction of the pages: 0 streams all, 1 leaves all to the host, None follows the measurements.
    Passes of more than `most_rows` tokens are streamed.
    """

    def __init__(self, share: float | None, most_rows: float = float("inf")) -> None:
        self._share, self._most_rows = share, most_rows
        self._link: float | None = None  # seconds per page
        self._host: dict[int, float] = {}  # seconds per page, by the bit length of the number of rows
        self._rest: dict[int, float] = {}  # seconds between two layers' attentions, in which only the link works

    def streamed(self, pages: int, rows: int) -> int:
        """Return how many of `pages` whole pages to stream, for a pass of `rows` tokens."""
        if rows > self._most_rows:
            return pages
        if self._share is not None:
            return pages - round(self._share * pages)
        kind = rows.bit_length()
        link, host = self._link, self._host.get(kind)
        if link is None or host is None:  # half each, to measure both
            return -(-pages // 2)
        # pages * s * link = rest + pages * (1 - s) * host
        total = self._rest.get(kind, 0.0) + pages * host
        least = 1 if pages > 1 else 0  # for either side: a side without pages is never measured again
        return min(max(round(total / (link + host)), least), pages - least)

    def observe_link(self, seconds: float) -> None:
        """Note that a page took `seconds` on the link."""
        self._link = _averaged(self._link, seconds)

    def observe_host(self, rows: int, seconds: float, rest: float | None) -> None:
        """Note that the host took `seconds` per page, `rest` seconds after the previous layer's attention."""
        kind = rows.bit_length()
        self._host[kind] = _averaged(self._host.get(kind), seconds)
        if rest is not None:
            self._rest[kind] = _averaged(self._rest.get(kind), rest)


def _averaged(average: float | None, new: float) -> float:
    return new if average is None else _SMOOTHING * average + (1 - _SMOOTHING) * new


class Stopwatch:
    """Measures the seconds from one layer's attention to the next one's."""

    def __init__(self) -> None:
        self._since: float | None = None

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self._since = None

    def lap(self) -> float | None:
        return None if self._since is None else time.perf_counter() - self._since
