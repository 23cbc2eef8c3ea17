"""File descriptors: how many connections they suffice for. Imports nothing heavy."""

from __future__ import annotations

import os
from dataclasses import dataclass

USUAL = 512  # connections, beside those of requests that run and wait
_OTHERS = 64  # descriptors for files: the prompt cache, documents, libraries
_LEAST = 8
_BURST = 128  # connections that may wait to be accepted


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections.

    Args:
        most: connections that are open.
        backlog: connections that may wait to be accepted, and that are accepted at a time.
    """

    most: int = USUAL
    backlog: int = _BURST

    @property
    def requests(self) -> int:
        """Requests at a time: the places that are left are for the page, /health and whoever is about to ask."""
        return self.most - max(1, self.most // 8)


def reserve_descriptors(requests: int) -> ConnectionLimits:
    """Raise the soft limit of descriptors to what the connections of a server need; return those that it suffices for.

    `requests` is the number of them that may run and wait. For a server that is about to listen.
    """
    wanted = USUAL + requests
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return ConnectionLimits(wanted)
    held = len(os.listdir("/dev/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = held + _OTHERS + wanted + 4 * _BURST
    if soft == resource.RLIM_INFINITY:
        return ConnectionLimits(wanted)
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    free = max(soft - held, 0)
    backlog = max(_LEAST, min(_BURST, free // 16))
    # A burst of connections is accepted, some times over, before the first of those that must go for it has gone.
    return ConnectionLimits(max(_LEAST, min(wanted, free - _OTHERS - 4 * backlog)), backlog)
