"""SIGTERM: what runs is finished, then the server ends; a second one ends it at once."""

import contextlib
import os
import signal
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from tests.support.serving import CONTEXT, Served, connected, listener, serve_options
from triforce_cli.serve import server
from triforce_cli.serve.connections import ConnectionLimits
from triforce_cli.serve.endpoint import create_app
from triforce_cli.serve.engine_thread import EngineThread
from triforce_cli.serve.server import HttpServer, serve_until_signalled, served_model
from triforce_cli.serve.server_metrics import ServerMetrics
from triforce_cli.signals import listen


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_hangup_that_the_parent_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    listen()
    app = SimpleNamespace(state=SimpleNamespace(expire=None, report=print, limits=ConnectionLimits()))
    with HttpServer(app, 0, print).capture_signals():
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert callable(signal.getsignal(signal.SIGTERM))
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_signal_ends_the_server_after_what_runs(opened, loaded):
    options, metrics, bound, texts = serve_options(drain=30), ServerMetrics(), listener(), []
    engine = EngineThread(loaded, 2, 4, metrics.ended)
    app = create_app(served_model(opened, CONTEXT), engine, metrics, options)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"

    def ask():
        body = {"prompt": "Once", "max_tokens": 60, "temperature": 0, "stream": True}
        with connected(Served(url, engine, None)) as client, client.stream("POST", "/v1/completions", json=body) as got:
            for number, text in enumerate(got.iter_text()):
                if not number:
                    os.kill(os.getpid(), signal.SIGTERM)
                texts.append(text)

    def ask_and_forgive():
        try:
            ask()
        except Exception as error:  # the connection is closed in the middle
            texts.append(repr(error))

    client = threading.Thread(target=ask_and_forgive)
    serve_until_signalled(app, engine, bound, options.drain, client.start)
    client.join(60)
    assert engine.stop(60)
    assert app.state.encoding.is_busy is False
    assert texts[-1].endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("signals", [1, 2])
def test_what_is_left_after_the_drain_is_told_so_and_nothing_holds_the_server_up(
    opened, loaded, signals, caplog, monkeypatch
):
    """A stream that runs, and a prompt whose encoding hangs."""
    monkeypatch.setattr(server, "_GRACE", 60)  # a busy machine may need more to send what they are told
    options, metrics, bound, found = serve_options(drain=0), ServerMetrics(), listener(), {}
    drain = 0 if signals == 1 else 600
    engine = EngineThread(loaded, 2, 4, metrics.ended)
    model, go_on, encoding = served_model(opened, CONTEXT), threading.Event(), threading.Event()
    sequences = model.encoder.sequences

    def hanging(wanted, scope):
        if wanted.prompts == ["hang"]:
            encoding.set()
            go_on.wait(60)
        return sequences(wanted, scope)

    def paced(requests, parallel):  # the answer must not end before its client has sent the signals
        for event in generate_batch(requests, parallel):
            yield event
            time.sleep(0.01)

    generate_batch = loaded.generate_batch
    monkeypatch.setattr(loaded, "generate_batch", paced)
    model.encoder.sequences = hanging
    app = create_app(model, engine, metrics, options)
    served = Served(f"http://127.0.0.1:{bound.getsockname()[1]}", engine, None)

    def hang():
        with connected(served) as client, contextlib.suppress(httpx.HTTPError):
            found["hung"] = client.post("/v1/completions", json={"prompt": "hang"})

    def ask():
        encoding.wait(60)
        body = {"prompt": "Once", "max_tokens": 500, "temperature": 0, "stream": True}
        with connected(served) as client, client.stream("POST", "/v1/completions", json=body) as got:
            for number, text in enumerate(got.iter_text()):
                for each in (signal.SIGTERM, signal.SIGINT)[: 0 if number else signals]:  # two of a kind may be merged
                    os.kill(os.getpid(), each)
                found["last"] = text

    def ask_and_forgive():
        with contextlib.suppress(httpx.HTTPError):
            ask()

    clients = [threading.Thread(target=each) for each in (hang, ask_and_forgive)]
    ended = serve_until_signalled(app, engine, bound, drain, lambda: [client.start() for client in clients])
    for client in clients:
        client.join(60)
    assert not ended and app.state.encoding.is_busy and not any(record.exc_info for record in caplog.records)
    if signals == 1:
        assert found["hung"].status_code == 503 and "shutting down" in found["hung"].text
        assert "shutting down" in found["last"] and "server_error" in found["last"]
    go_on.set()
    assert engine.stop(60)
