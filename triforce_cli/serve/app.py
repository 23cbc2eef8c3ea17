"""The HTTP application: routes, who may use them, and what each does."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, AuthenticationError, SimpleUser
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offload.short_repr import short_repr, short_text

from ..output.format import duration
from .answer import Answer
from .engine_thread import EngineThread
from .errors import ApiError, api_error
from .request import parse_request
from .sequences import ServedModel
from .serve_options import ServeOptions
from .server_metrics import ServerMetrics

_PAGE = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_OPEN = {*_PAGE, "/health", "/v1/health", "/ready"}  # need no key: nothing secret, and the page asks for the key itself
_WATCHED = _OPEN | {"/metrics"}
_CHAT, _MODELS = "POST /v1/chat/completions", "GET /v1/models"
_ELSEWHERE = {  # paths of other interfaces, and what to use here
    **dict.fromkeys(("/v1/responses", "/responses", "/v1/messages", "/messages", "/api/chat"), f"use {_CHAT}"),
    **dict.fromkeys(("/api/generate", "/completion"), "use POST /v1/completions"),
    **dict.fromkeys(("/v1/embeddings", "/embeddings", "/api/embed"), "this server generates text, no embeddings"),
    **dict.fromkeys(("/api/tags", "/api/show"), f"use {_MODELS}"),
}
# The page runs its own script and style alone, and talks to its own server alone.
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
_POLICY += "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def create_app(
    model: ServedModel,
    engine: EngineThread,
    metrics: ServerMetrics,
    options: ServeOptions,
    report: Callable[[Exception], None],
    say: Callable[[str], None] = lambda text: None,
) -> Starlette:
    """Return the application over a running engine.

    `report` is called with errors that clients are not told, `say` with a line about each request.
    """
    middleware = [Middleware(AuthenticationMiddleware, backend=_Keys(options), on_error=_refused)]
    if options.is_local:  # a page of another site could reach it by a name that it has made to point here
        hosts = ["localhost", "127.0.0.1", "::1", "[::1]", options.host]
        middleware.insert(0, Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False))
    if options.origins:  # outside of the keys: a browser's preflight request has none
        allowed = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": ["retry-after"]}
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=options.origins, **allowed))

    middleware.insert(0, Middleware(_Log, say=say))

    async def failed(request: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            report(error)
        return _response(api_error(error))

    handlers: dict[Any, Any] = {ApiError: failed, HTTPException: _http_error, ClientDisconnect: _disconnected}
    routes = Endpoints(model, engine, metrics, options, report).routes()
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers | {Exception: failed})


class _Log:
    """Says what each request was and how long it took, but for those of the page and of who watches the server."""

    def __init__(self, app: ASGIApp, say: Callable[[str], None]) -> None:
        self._app, self._say = app, say

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.perf_counter(), 499  # of a client that has gone
        state = scope.setdefault("state", {})

        async def sent(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            if status >= 400 or scope["path"] not in _WATCHED:
                answer: Answer | None = state.get("answer")
                facts = [] if answer is None else [answer.facts()]
                path = short_text(scope["path"]) if scope["path"].isprintable() else short_repr(scope["path"])
                facts = [f"{scope['method']} {path} {status}", *facts, duration(time.perf_counter() - began)]
                self._say(" · ".join(facts))


class _Keys(AuthenticationBackend):
    """Lets in who has a key."""

    def __init__(self, options: ServeOptions) -> None:
        self._keys = options.keys

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, SimpleUser]:
        if not self._keys or conn.url.path in _OPEN:
            return AuthCredentials(), SimpleUser("")
        kind, _, given = conn.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not self._keys.have(given.strip()):
            raise AuthenticationError("no API key that is known")
        return AuthCredentials(), SimpleUser("")


def _refused(conn: HTTPConnection, error: Exception) -> Response:
    return _response(ApiError(401, str(error), "invalid_api_key", www_authenticate="Bearer"))


def _response(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    return _response(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for nobody: the client has gone


@dataclass(frozen=True, slots=True)
class Endpoints:
    """What the routes do."""

    _model: ServedModel
    _engine: EngineThread
    _metrics: ServerMetrics
    _options: ServeOptions
    _report: Callable[[Exception], None]
    _created: int = field(default_factory=lambda: int(time.time()))

    def routes(self) -> list[Route]:
        both = [  # some clients leave /v1 out of the address
            route
            for prefix in ("/v1", "")
            for route in (
                Route(f"{prefix}/chat/completions", self._chat, methods=["POST"]),
                Route(f"{prefix}/completions", self._completion, methods=["POST"]),
                Route(f"{prefix}/models", self._models),
                Route(f"{prefix}/models/{{name:path}}", self._described),
                Route(f"{prefix}/health", self._health),
            )
        ]
        elsewhere = [Route(path, self._elsewhere, methods=["GET", "POST"]) for path in _ELSEWHERE]
        watched = [Route("/ready", self._ready), Route("/metrics", self._counts)]
        return [*both, *elsewhere, *watched, *(Route(path, self._page) for path in _PAGE)]

    async def _elsewhere(self, request: Request) -> Response:
        path = request.url.path
        raise ApiError(404, f"{request.method} {path} is not there; {_ELSEWHERE[path]}", "not_found")

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description()]})

    async def _described(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._description())

    def _description(self) -> dict[str, Any]:
        facts = {"object": "model", "created": self._created, "owned_by": "triforce"}
        return {"id": self._model.name, **facts, "max_model_len": self._model.context}

    async def _health(self, request: Request) -> Response:
        """Say whether the engine runs."""
        return JSONResponse({"status": "ok"}) if self._engine.is_alive() else JSONResponse({"status": "error"}, 503)

    async def _ready(self, request: Request) -> Response:
        """Say whether a request would be taken now, for those who choose among servers."""
        try:
            self._engine.check(1)
        except ApiError:
            return JSONResponse({"status": "busy"}, 503)
        return JSONResponse({"status": "ready"})

    async def _counts(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _page(self, request: Request) -> Response:
        name = _PAGE[request.url.path]
        content = (files(__package__) / "page" / name).read_bytes()
        return Response(content, 200, {"content-security-policy": _POLICY}, _TYPES[name.rpartition(".")[2]])

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, is_chat=True)

    async def _completion(self, request: Request) -> Response:
        return await self._answer(request, is_chat=False)

    async def _answer(self, request: Request, is_chat: bool) -> Response:
        data = await _body(request, self._options.body)
        wanted = await run_in_threadpool(parse_request, data, is_chat, self._options.ignore_unknown)
        self._check_model(wanted.model)
        self._engine.check(wanted.sequences)
        settings = await run_in_threadpool(self._model.sequences, wanted)
        answer = Answer(self._model, settings, wanted.choices)
        self._engine.submit(answer.sequences)
        request.state.answer = answer
        if wanted.stream:
            events = answer.streamed(wanted.usage, self._report, wanted.counts_always)
            return _Events(events, lambda: self._engine.cancel(answer.sequences))
        try:
            return JSONResponse(await _unless_closed(request, answer.whole()))
        finally:
            self._engine.cancel(answer.sequences)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model.name):
            message = f"there is no model {short_repr(name)} here, only {self._model.name!r}"
            raise ApiError(404, message, "model_not_found", "model")


async def _body(request: Request, most: int) -> bytes:
    """Return a body of at most `most` bytes. Raises ApiError for more, or if a page of another site could send it."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        how = "the Content-Type must be application/json: curl needs -H 'Content-Type: application/json'"
        raise ApiError(415, how, "unsupported_media_type")
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > most:
            raise ApiError(413, f"the request has more than {most:,} bytes", "request_too_large")
    return bytes(data)


class _Events(StreamingResponse):
    """Server-sent events. However the response ends, by itself or because the client has gone, `close` is called."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _unless_closed(request: Request, answering: Coroutine[Any, Any, Any]) -> Any:
    """Return what is awaited. Raises ClientDisconnect as soon as the client has gone."""

    async def closed() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, gone = asyncio.ensure_future(answering), asyncio.ensure_future(closed())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientDisconnect
    finally:
        work.cancel()
        gone.cancel()
