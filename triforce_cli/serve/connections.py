"""Bounds connections: how many there are, and the time that each may take to send a request and to read its answer.

uvicorn closes those that are idle after a response, and counts requests; what has not sent a request yet it lets be.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

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


HEAD_BYTES = 1 << 14  # of the longest head of a request
PATIENCE = 10  # seconds for a head, from the connection or the last response on; also for the rest of a refused body
STALLED = 60  # seconds after which a client that has read nothing of what was sent is gone
_UNREAD = 1 << 28  # bytes of a refused body that are read and dropped, so that its client can read the answer
_HEAD, _BODY, _ANSWER = "head", "rest of a body that nobody reads", "answer"  # what a connection waits for


class Places:
    """The places of all connections. If none is free, the connection that has waited longest for its client goes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # the oldest first

    def enter(self, connection: Connection) -> None:
        """Take a place, which `set_idle` has named idle."""
        self._open.add(connection)
        if len(self._open) > self._most:
            oldest = next(iter(self._idle))
            self.leave(oldest)
            oldest.abort()

    def leave(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def set_idle(self, connection: Connection, is_idle: bool) -> None:
        """Note whether a connection waits for its client, or its client for an answer."""
        self._idle.pop(connection, None)
        if is_idle:
            self._idle[connection] = None


class Connection(H11Protocol):
    """uvicorn's connection, in bounded time, which refuses a request whose end a proxy in front may see elsewhere.

    A connection that is closed while its request still comes is closed for writing first: the reset that follows
    a closed socket would take from the client the answer that it has not read.
    """

    def __init__(self, places: Places, config: Any, server_state: Any, app_state: Any, _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Requests(h11.SERVER, HEAD_BYTES)
        self._places = places
        self._waits_for = ""
        self._waiting: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes
        self._is_invalid = self._lingers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        self._socket = transport
        super().connection_made(_ClosedGently(transport, self))  # type: ignore[arg-type]
        self._update()
        self._places.enter(self)

    def data_received(self, data: bytes) -> None:
        """Read what has come, or drop it where nobody reads it."""
        if self._waits_for == _BODY:
            self._unread += len(data)
            if self._unread > _UNREAD:
                self.abort()
                return
        if not self._lingers:
            super().data_received(data)
            self._update()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._update()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._is_invalid = True
        super().send_400_response(msg)

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        """Go on after the client has read."""
        super().resume_writing()
        self._cancel(self._writing)

    def shutdown(self) -> None:
        """End after the answer under way; at once if there is none."""
        super().shutdown()
        if self._waits_for != _ANSWER:
            self._socket.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the place."""
        self._places.leave(self)
        self._cancel(self._waiting, self._writing)
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close, whatever has not been sent."""
        self._socket.abort()

    def close(self) -> None:
        """Close; where the request has not come to its end, after the client could read the answer."""
        if self.is_closing:
            return
        if not self._is_invalid and self.conn.their_state is not h11.SEND_BODY:
            self._socket.close()
            return
        self._lingers = True
        with suppress(OSError):  # the client has gone
            self._socket.write_eof()
        self.flow.resume_reading()
        self._update()

    @property
    def is_closing(self) -> bool:
        """Whether nothing more is to be sent."""
        return self._lingers or self._socket.is_closing()

    def _update(self) -> None:
        """Start the time anew when what the connection waits for has changed."""
        waits_for = self._awaited()
        if waits_for == self._waits_for or self not in self.connections:
            return
        self._waits_for, self._unread = waits_for, 0
        self._cancel(self._waiting)
        self._places.set_idle(self, waits_for != _ANSWER)
        if waits_for != _ANSWER:
            self._waiting = self.loop.call_later(PATIENCE, self._expire)

    def _awaited(self) -> str:
        if self._lingers:
            return _BODY
        if self.cycle is not None and not self.cycle.response_complete:
            return _ANSWER
        return _HEAD if self.conn.their_state is h11.IDLE else _BODY

    def _expire(self) -> None:
        if not self._socket.get_write_buffer_size():
            self.abort()
            return
        self._socket.close()  # when the answer has been sent
        self._await_reading()

    def _await_reading(self, before: int | None = None) -> None:
        """Abort if the client has read nothing since `before` bytes were left to be sent."""
        left = self._socket.get_write_buffer_size()
        self._cancel(self._writing)
        if left == before:
            self.abort()
        elif left:
            self._writing = self.loop.call_later(STALLED, self._await_reading, left)

    @staticmethod
    def _cancel(*timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()


class _ClosedGently:
    """A transport that its connection closes."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport, self._connection = transport, connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._connection.close()

    def is_closing(self) -> bool:
        return self._connection.is_closing


class _Requests(h11.Connection):
    """Parses requests; one of two lengths, or in chunks where HTTP has none, is invalid (RFC 9112, 6.1 and 6.3)."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise h11.RemoteProtocolError("Transfer-Encoding with Content-Length, or in HTTP/1.0")
        return event
