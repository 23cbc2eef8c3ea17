"""The HTTP application: routes, and what each does."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from traceback import print_exception
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from offload.loading.tokenizers.tokenizer import Tokenizer
from offload.short_repr import short_repr

from .api_errors import ApiError, api_error, unavailable
from .api_request import MOST_SEQUENCES, ApiRequest, parse_chat, parse_completion
from .bodies import MOST_PARTS, Bodies, check_json
from .connections import ConnectionLimits
from .encoding_threads import Documents, EncodingThreads
from .engine_thread import EngineThread
from .guard import Guard, page_routes
from .responses import Form, streamed, whole
from .sequences import Answer, PromptEncoder, SequenceSettings
from .serve_options import ServeOptions
from .server_metrics import ServerMetrics

Report = Callable[[Exception], None]
_SHUTTING_DOWN = "the server is shutting down"
_CLOSED = 499  # a status for the log alone: the client has gone


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that is served: its name, what prepares its prompts, and the tokenizer that decodes its answers.

    The engine's thread has that `tokenizer` for itself: it must not be the one of the `encoder`.
    """

    name: str
    encoder: PromptEncoder
    tokenizer: Tokenizer
    context: int


def create_app(
    model: ServedModel,
    engine: EngineThread,
    metrics: ServerMetrics,
    options: ServeOptions,
    report: Report = print_exception,
    limits: ConnectionLimits | None = None,
) -> Starlette:
    """Return the application over a running engine.

    Its state has `expire`, which ends all requests, the threads `encoding`, and for its HTTP server the `limits` of
    connections and `report`, which is called with errors that clients are not told.
    """
    limits = limits or ConnectionLimits()
    endpoints = Endpoints(model, engine, metrics, options, report)
    guard = Middleware(Guard, options=options, most=limits.requests, count=metrics.response, report=report)
    middleware = [guard]
    if options.origins:
        allowed = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": ["retry-after"]}
        # Outside of the guard: a browser's preflight request has no key.
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=options.origins, **allowed))
    routes = [
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/completions", endpoints.completion, methods=["POST"]),
        Route("/documents", endpoints.document, methods=["POST"]),
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
        Route("/health", endpoints.health, methods=["GET"]),
        Route("/ready", endpoints.ready, methods=["GET"]),
        Route("/metrics", endpoints.metrics, methods=["GET"]),
        *page_routes(),
    ]
    handlers = {ApiError: _api_error, HTTPException: _http_error, ClientDisconnect: _disconnected}
    handlers[Exception] = _failed  # which is raised again after that, for the log
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.state.encoding, app.state.expire = endpoints.encoding, endpoints.expire
    app.state.limits, app.state.report = limits, report
    return app


class Endpoints:
    """What the routes do."""

    def __init__(
        self, model: ServedModel, engine: EngineThread, metrics: ServerMetrics, options: ServeOptions, report: Report
    ) -> None:
        self._report, self._ignore_unknown = report, options.ignore_unknown
        self.encoding = EncodingThreads()
        self._model, self._engine, self._metrics, self._bodies = model, engine, metrics, Bodies(options.body)
        self._documents = Documents(self.encoding, model.encoder.count_tokens)
        self._created = int(time.time())

    def expire(self) -> None:
        """Answer all requests with status 503: the time to end them is over. Called in the event loop."""
        self._engine.fail(_SHUTTING_DOWN)
        self.encoding.fail(unavailable(_SHUTTING_DOWN))

    async def chat(self, request: Request) -> Response:
        """Answer /v1/chat/completions."""
        return await self._answer(request, parse_chat, is_chat=True)

    async def completion(self, request: Request) -> Response:
        """Answer /v1/completions."""
        return await self._answer(request, parse_completion, is_chat=False)

    async def document(self, request: Request) -> Response:
        """Answer /documents: the text of a file, and how many tokens it has."""
        with self._bodies.place(request, "application/octet-stream") as body:
            data = await body.read()
            found = await _unless_closed(request, self._documents.read(data, request.query_params.get("name", "")))
        return JSONResponse(found)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._description)

    async def health(self, request: Request) -> Response:
        """Say whether the engine runs."""
        return JSONResponse({"status": "ok"}) if self._engine.is_alive else JSONResponse({"status": "error"}, 503)

    async def ready(self, request: Request) -> Response:
        """Say whether a request would be taken now, for those who choose among servers."""
        return JSONResponse({"status": "ready"}) if self._engine.is_ready() else JSONResponse({"status": "busy"}, 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    @property
    def _description(self) -> dict[str, Any]:
        facts = {"id": self._model.name, "object": "model", "created": self._created, "owned_by": "triforce"}
        return facts | {"max_model_len": self._model.context}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model.name):
            raise ApiError(
                404, f"there is no model {short_repr(name)} here, only {self._model.name!r}", "model_not_found", "model"
            )

    def _parsed(self, data: bytes, parse: Callable[[bytes, bool], ApiRequest]) -> ApiRequest:
        check_json(data, MOST_PARTS + MOST_SEQUENCES * self._model.context)  # as many as there can be token ids
        return parse(data, self._ignore_unknown)

    async def _prepared(
        self, data: bytearray, parse: Callable[[bytes, bool], ApiRequest], scope: str
    ) -> tuple[ApiRequest, list[SequenceSettings]]:
        try:
            wanted = await self.encoding.run(self._parsed, data, parse)
            self._check_model(wanted.model)
            with self._engine.reserved(wanted.sequences):
                return wanted, await self.encoding.run(self._model.encoder.sequences, wanted, scope)
        except RecursionError:  # of the JSON in a text, or where values are written as JSON again
            raise ApiError(400, "the request is nested too deeply") from None

    async def _answer(self, request: Request, parse: Callable[[bytes, bool], ApiRequest], is_chat: bool) -> Response:
        with self._bodies.place(request) as body:  # for its text too, until that is encoded
            wanted, settings = await self._prepared(await body.read(), parse, request.state.cache_scope)
        tokenizer = self._model.tokenizer
        answer = Answer(settings, tokenizer)
        form = Form(is_chat, self._model.name, None if wanted.logprobs is None else tokenizer.token_bytes)
        self._engine.submit(answer.sequences)  # in the places that were held: nothing else runs in between
        if wanted.stream:
            events = streamed(answer, form, wanted.choices, wanted.usage, wanted.statistics, self._report)
            return _Events(events, lambda: self._engine.cancel(answer.sequences))
        try:
            return JSONResponse(await _unless_closed(request, whole(answer, form, wanted.choices)))
        finally:
            self._engine.cancel(answer.sequences)


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


async def _unless_closed(request: Request, answering: Any) -> Any:
    """Return what is awaited. Raises ClientDisconnect as soon as the client has gone."""
    work, gone = asyncio.ensure_future(answering), asyncio.ensure_future(_until_closed(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientDisconnect
    finally:
        work.cancel()
        gone.cancel()


async def _until_closed(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    found = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(found.body(), found.status, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse(api_error(error).body(), 500)


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLOSED)
