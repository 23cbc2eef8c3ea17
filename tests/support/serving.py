"""A server over a tiny model, in this process: the real application and HTTP server, on a free port of this machine."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from offload.engine import Engine
from triforce_cli.options.command_request import Request
from triforce_cli.options.settings import resolve
from triforce_cli.output.terminal import Terminal
from triforce_cli.run.model_request import ModelRequest, open_request
from triforce_cli.serve.connections import ConnectionLimits
from triforce_cli.serve.endpoint import create_app
from triforce_cli.serve.engine_thread import EngineThread
from triforce_cli.serve.serve_options import ApiKeys, ServeOptions
from triforce_cli.serve.server import HttpServer, served_model
from triforce_cli.serve.server_metrics import ServerMetrics

CONTEXT = 512


@dataclass
class Served:
    """A running server: its URL, and the thread that generates."""

    url: str
    engine: EngineThread
    server: HttpServer
    reported: list[Exception] = field(default_factory=list)


def opened_model(folder: Path, **settings) -> ModelRequest:
    values = {"model": str(folder), "device": "cpu", "dtype": "float32", "threads": 1, "cache": False} | settings
    return open_request(Request(resolve(values, {}, "cpu"), None, "serve"), Terminal(), quiet=True)


def serve_options(*keys, **changes) -> ServeOptions:
    usual = {"host": "127.0.0.1", "port": 0, "keys": ApiKeys(keys), "origins": (), "separates_keys": False}
    usual |= {"parallel": 3, "queue": 8, "context": CONTEXT, "body": 20_000, "drain": 20}
    return ServeOptions(**usual | changes)


def listener() -> socket.socket:
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    return found


def raw_connection(served: Served, data: bytes = b"") -> socket.socket:
    """Return a connection on which some bytes have been sent."""
    address = urlsplit(served.url)
    found = socket.create_connection((address.hostname, address.port), timeout=60)
    found.sendall(data)
    return found


def until_closed(connection: socket.socket) -> bytes:
    """Return what is received until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def connected(served: Served, path: str = "") -> httpx.Client:
    """Return a client; it loads no certificates, which takes longer than a request.

    It closes idle connections before the server does, after 5 seconds: it could be about to use one at that moment.
    """
    limits = httpx.Limits(keepalive_expiry=1)
    return httpx.Client(base_url=f"{served.url}{path}", verify=False, timeout=60, limits=limits)


def openai_client(served: Served):
    """Return OpenAI's own client, whose import takes a second."""
    from openai import OpenAI

    client = connected(served, "/v1")
    return OpenAI(base_url=client.base_url, api_key="none", max_retries=0, timeout=60, http_client=client)


@contextmanager
def serving(
    opened: ModelRequest, engine: Engine, options: ServeOptions, limits: ConnectionLimits | None = None
) -> Iterator[Served]:
    """Serve in a thread until the context is left."""
    metrics = ServerMetrics()
    reported: list[Exception] = []
    thread = EngineThread(engine, options.parallel, options.queue, metrics.ended, reported.append)
    metrics.watch(thread)
    app, listening, bound = (
        create_app(served_model(opened, CONTEXT), thread, metrics, options, reported.append, limits),
        threading.Event(),
        listener(),
    )
    server = HttpServer(app, options.drain, listening.set)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    running = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
    thread.start()
    running.start()
    try:
        assert listening.wait(60)
        yield Served(url, thread, server, reported)
    finally:
        server.end()
        running.join(60)
        assert thread.stop(60)
