"""How many of a layer's pages come over the link while the host attends to the others, so that both end together."""

from __future__ import annotations

_MEMORY = 0.8  # of what was known stays known when something new is measured


class Balance:
    """The split between the two, from times measured while running.

    `share` is the host's part of the pages: 0 is streaming alone, 1 the host alone, None what the measurements say.
    """

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._link: float | None = None  # seconds a page
        self._host: dict[int, float] = {}  # the same, by the power of two of the rows
        self._rest: dict[int, float] = {}  # seconds between two attentions: only the link goes on in them

    def streamed(self, pages: int, rows: int) -> int:
        """How many of so many pages to stream, for a pass of so many rows."""
        if self._share is not None:
            return pages - round(self._share * pages)
        kind = rows.bit_length()
        link, host = self._link, self._host.get(kind)
        if link is None or host is None:  # something of both, to see how long it takes
            return -(-pages // 2)
        # pages * s * link = rest + pages * (1 - s) * host
        both = self._rest.get(kind, 0.0) + pages * host
        least = 1 if pages > 1 else 0  # of each kind, or a rate that has become better would never be seen
        return min(max(round(both / (link + host)), least), pages - least)

    def observe_link(self, seconds: float) -> None:
        """A page came in so long."""
        self._link = _moved(self._link, seconds)

    def observe_host(self, rows: int, seconds: float, rest: float | None) -> None:
        """The host took so long for a page; so long passed between the last attention and this one."""
        kind = rows.bit_length()
        self._host[kind] = _moved(self._host.get(kind), seconds)
        if rest is not None:
            self._rest[kind] = _moved(self._rest.get(kind), rest)


def _moved(known: float | None, new: float) -> float:
    return new if known is None else _MEMORY * known + (1 - _MEMORY) * new
