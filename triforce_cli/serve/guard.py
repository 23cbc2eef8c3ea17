"""What every request must pass: the Host and Origin headers, and the API key; headers of every response; and the page.

The page at / needs nothing: it is files of this package, which load nothing from elsewhere."""

import asyncio
import ipaddress
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from importlib.resources import files
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offload.errors import TriforceError

from .api_errors import ApiError, api_error, busy, event_text, unavailable
from .serve_options import ServeOptions, is_loopback

_SCRIPTS = ("page.js", "api.js", "thread.js", "markdown.js")
_TYPES = {"index.html": "text/html", "page.css": "text/css"} | dict.fromkeys(_SCRIPTS, "text/javascript")
# The page runs its own script and style alone, and talks to its own server alone.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_NAMES = {"/" if name == "index.html" else f"/{name}": name for name in _TYPES}
PATHS = frozenset(_NAMES)


def page_routes() -> list[Route]:
    return [Route(path, _file(name), methods=["GET"]) for path, name in _NAMES.items()]


def _file(name: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    content = (files(__package__) / "page" / name).read_bytes()

    async def get(request: Request) -> Response:
        return Response(content, headers={"content-security-policy": POLICY}, media_type=_TYPES[name])

    return get


OPEN_PATHS = PATHS | {"/health", "/ready"}  # nothing secret: the page asks for the key itself
_COUNTED = OPEN_PATHS | {"/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics", "/documents"}
_HOST = re.compile(r"(\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[^\s:/?#@\\\[\]]+))(:\d*)?")
_PATIENCE = 0.5  # seconds for a client that does not read, when the server ends at once
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Middleware that refuses requests before any of their body is read. Sets `scope["state"]["cache_scope"]`.

    On a loopback address a page of another site could reach the endpoint through the user's browser: by a name of its
    own that it has made to point here (DNS rebinding), which the Host header shows, or as itself, which Origin shows.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: ServeOptions,
        most: int,
        count: Callable[[str, int], None],
        report: Callable[[Exception], None],
    ) -> None:
        """`count` is called with each response's path and status, `report` with errors that clients are not told.

        No more than `most` requests are let in at a time, but for paths that are open.
        """
        self._app, self._options, self._count, self._report = app, options, count, report
        self._most, self._running = most, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        has_begun = is_stream = False

        async def send_marked(message: Message) -> None:
            nonlocal has_begun, is_stream
            if message["type"] == "http.response.start":
                has_begun = True
                headers = MutableHeaders(scope=message)
                is_stream = headers.get("content-type", "").startswith("text/event-stream")
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                path = scope["path"]
                self._count(path if path in _COUNTED else "other", message["status"])
            await send(message)

        try:
            scope.setdefault("state", {})["cache_scope"] = self._checked(scope)
        except ApiError as error:
            response = JSONResponse(error.body(), error.status, error.headers)
            await response(scope, receive, send_marked)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send_marked)
        except asyncio.CancelledError:  # by uvicorn, which ends: its log would have a traceback of every request
            error = unavailable("the server is shutting down")
            if not has_begun:
                await JSONResponse(error.body(), error.status)(scope, receive, send_marked)
            elif is_stream:
                await _end(send, event_text(error.body()))
        except Exception as error:  # here, since the response is to be counted and to have the headers
            found = api_error(error)
            if not isinstance(error, TriforceError):
                self._report(error)
            if not has_begun:
                await JSONResponse(found.body(), found.status)(scope, receive, send_marked)
        finally:
            self._running -= 1

    def _checked(self, scope: Scope) -> str:
        """Return the scope of the request's cache. Raises ApiError."""
        path, headers = scope["path"], Headers(scope=scope)
        host = headers.get("host", "")
        if self._options.is_local and not is_local_host(host, self._options.host):
            raise ApiError(421, "the Host header is no name of this machine", "wrong_host")
        origin = headers.get("origin")
        if origin is not None and not self._allows(origin, f"{scope['scheme']}://{host}"):
            raise ApiError(403, "this origin may not use the endpoint; --cors allows one", "wrong_origin")
        if path in OPEN_PATHS:
            return ""
        if self._running >= self._most:
            raise busy("too many requests at a time")
        if not self._options.keys:
            return ""
        kind, _, given = headers.get("authorization", "").partition(" ")
        name = self._options.keys.scope(given.strip()) if kind.lower() == "bearer" else None
        if name is None:
            headers_ = {"www-authenticate": "Bearer"}
            raise ApiError(
                401, "no API key that is known", "invalid_api_key", type="authentication_error", headers=headers_
            )
        return name if self._options.separates_keys else ""

    def _allows(self, origin: str, own: str) -> bool:
        """Return whether a page may use the endpoint: the endpoint's own, and those that were named."""
        return origin == own or not {"*", origin}.isdisjoint(self._options.origins)


async def _end(send: Send, text: str) -> None:
    """Send the last part of a stream, unless the client does not read."""
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(send({"type": "http.response.body", "body": text.encode()}), _PATIENCE)


def is_local_host(header: str, host: str) -> bool:
    """Return whether a Host header names a loopback address, `localhost`, or the `host` that was asked for."""
    found = _HOST.fullmatch(header.lower())
    name = found and (found["v6"] or found["name"])
    return bool(name) and (is_loopback(name) or name == host.lower())


def address_text(host: str, port: int) -> str:
    try:
        is_v6 = ipaddress.ip_address(host).version == 6
    except ValueError:
        is_v6 = False
    return f"http://[{host}]:{port}" if is_v6 else f"http://{host}:{port}"
