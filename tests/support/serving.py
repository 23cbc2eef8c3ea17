"""The endpoint over a tiny model, in this process: the real application and engine thread, without sockets."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.applications import Starlette
from starlette.testclient import TestClient

from offload.engine import Engine
from triforce_cli.options.request import Request
from triforce_cli.options.settings import resolve
from triforce_cli.output.terminal import Terminal
from triforce_cli.run.opened_request import OpenedRequest, open_request
from triforce_cli.serve.app import create_app
from triforce_cli.serve.engine_thread import EngineThread
from triforce_cli.serve.sequences import ServedModel
from triforce_cli.serve.serve_options import ApiKeys, ServeOptions
from triforce_cli.serve.server_metrics import ServerMetrics

CONTEXT = 512
BASE = "http://127.0.0.1:8000"


@dataclass
class Served:
    """A running endpoint: its application and a client of it, the thread that generates, and errors of its own."""

    app: Starlette
    client: TestClient
    engine: EngineThread
    reported: list[Exception] = field(default_factory=list)


def opened_model(folder: Path, **settings) -> OpenedRequest:
    values = {"model": str(folder), "device": "cpu", "dtype": "float32", "threads": 1, "cache": False} | settings
    return open_request(Request(resolve(values, {}, "cpu"), None, "serve"), Terminal(), quiet=True)


def serve_options(*keys, **changes) -> ServeOptions:
    usual = {"host": "127.0.0.1", "port": 0, "keys": ApiKeys(keys), "origins": ()}
    usual |= {"parallel": 3, "queue": 8, "context": CONTEXT, "body": 20_000, "drain": 20}
    return ServeOptions(**usual | changes)


def openai_client(served: Served):
    """Return OpenAI's own client, whose import takes a second."""
    from openai import OpenAI

    return OpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0, http_client=served.client)


def hang_up(app: Starlette, path: str, body: dict) -> None:
    """Send a request, and go before its answer has ended; return when the application has noticed."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}

    async def receive():
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message):
        pass

    asyncio.run(app(scope, receive, send))


@contextmanager
def serving(opened: OpenedRequest, engine: Engine, options: ServeOptions) -> Iterator[Served]:
    """Serve until the context is left."""
    metrics, reported = ServerMetrics(), []
    thread = EngineThread(engine, options.parallel, options.queue, metrics.ended, reported.append)
    metrics.watch(thread)
    app = create_app(ServedModel(opened, CONTEXT), thread, metrics, options, reported.append)
    thread.start()
    try:
        with TestClient(app, BASE, raise_server_exceptions=False) as client:
            yield Served(app, client, thread, reported)
    finally:
        assert thread.stop(60)
