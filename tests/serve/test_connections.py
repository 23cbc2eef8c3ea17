"""Connections that send nothing, or slowly, or too much, or read nothing; and requests of two lengths."""

import asyncio
import http.client
import json
import os
import resource
import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from tests.support.serving import connected, raw_connection, serve_options, serving, until_closed
from tests.support.waiting import until
from triforce_cli.serve import connections, server
from triforce_cli.serve.connections import ConnectionLimits, reserve_descriptors

COMPLETIONS = "/v1/completions"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nX: ", HEALTH, HEALTH + b"GET / HTTP/1.1\r\nX: "])
def test_a_head_that_does_not_come_in_time_closes_its_connection(served, monkeypatch, first):
    """However often a byte of it comes."""
    monkeypatch.setattr(served.server.config, "timeout_keep_alive", 600)  # uvicorn's own, of an idle connection
    for patience in (0.1, 1, 10):  # a busy machine may take longer than the first to send what it sends at once
        monkeypatch.setattr(connections, "PATIENCE", patience)
        if (answers := answers_until_closed(served, first)) == first.count(HEALTH):
            break
    assert answers == first.count(HEALTH)


def answers_until_closed(served, first):
    """Send what comes first, then a byte now and then; return how many answers come before the connection ends."""
    with raw_connection(served, first) as slow:
        slow.settimeout(0.01)
        received, give_up = b"", time.monotonic() + 60
        while time.monotonic() < give_up:
            try:
                try:
                    data = slow.recv(1 << 16)
                    received += data
                    if not data:
                        break
                except TimeoutError:
                    pass
                slow.sendall(b"x" if first[-1:] == b" " else b"")
            except ConnectionError:
                break
        else:
            pytest.fail("it stays open")
    return received.count(b"HTTP/1.1 200")


def test_idle_connections_give_their_places_to_others_and_answers_keep_theirs(opened, loaded, monkeypatch):
    monkeypatch.setattr(connections, "PATIENCE", 600)
    limits = ConnectionLimits(most=4)
    with serving(opened, loaded, serve_options(), limits) as served, ExitStack() as stack, connected(served) as client:
        body = {"prompt": "Once", "max_tokens": 300, "temperature": 0, "stream": True}
        stream = stack.enter_context(client.stream("POST", COMPLETIONS, json=body))
        texts = stream.iter_text()
        assert next(texts)
        idle = [stack.enter_context(raw_connection(served)) for _ in range(12)]
        for _ in range(2):
            with connected(served) as other:
                assert other.get("/health").status_code == 200
        assert [until_closed(each) for each in idle[:8]] == [b""] * 8
        assert "".join(texts).endswith("data: [DONE]\n\n")


def test_requests_beyond_the_places_are_told_when_to_try_again(opened, loaded):
    limits = ConnectionLimits(most=3)  # two requests
    with serving(opened, loaded, serve_options(), limits) as served, connected(served) as client, ExitStack() as stack:
        head = f"{POST}Content-Length: 9\r\nExpect: 100-continue\r\n\r\n".encode()
        for _ in range(limits.requests):
            slow = stack.enter_context(raw_connection(served, head))
            assert slow.recv(1 << 16).startswith(b"HTTP/1.1 100")
        refused = client.get("/v1/models")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert client.get("/health").status_code == 200
        stack.close()
        until(lambda: client.get("/v1/models").status_code == 200)


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/nothing"])
def test_a_client_that_sends_all_before_it_reads_gets_the_answer(served, connection, path):
    client = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=60)
    headers = {"Content-Type": "application/json", "Connection": connection}
    client.request("POST", path, b" " * (8 << 20), headers)
    assert client.getresponse().status == (413 if path == COMPLETIONS else 404)
    client.close()


def test_a_refused_body_without_an_end_is_broken_off(served, monkeypatch):
    monkeypatch.setattr(connections, "_UNREAD", 1 << 20)
    with raw_connection(served, f"{POST}Content-Length: 99999999\r\n\r\n".encode()) as endless:
        with pytest.raises(ConnectionError):  # noqa: PT012
            for _ in range(99):
                endless.sendall(b" " * 999_999)
        until(lambda: not served.engine.num_running)


def test_an_answer_without_a_reader_is_broken_off(served, monkeypatch):
    monkeypatch.setattr(connections, "STALLED", 0.05)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        other.settimeout(60)
        address = urlsplit(served.url)
        other.connect((address.hostname, address.port))
        with pytest.raises(ConnectionError):  # noqa: PT012
            for _ in range(100_000):
                other.sendall(b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n")


@pytest.mark.parametrize("line", [f"POST {COMPLETIONS} HTTP/1.1", "OPTIONS /health HTTP/1.1", "GET /health HTTP/1.0"])
def test_a_request_of_two_lengths_is_refused_and_what_follows_is_not_read(served, line):
    lengths = "Transfer-Encoding: chunked\r\n" + ("" if line.endswith("0") else "Content-Length: 5\r\n")
    smuggled = f"{line}\r\nHost: localhost\r\n{lengths}\r\n0\r\n\r\n".encode() + HEALTH
    with raw_connection(served, smuggled) as other:
        received = until_closed(other)
    assert received.startswith(b"HTTP/1.1 400") and received.count(b"HTTP/1.1") == 1


def test_without_descriptors_it_says_so_once_and_goes_on_when_there_are_some(opened, loaded, monkeypatch):
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.05)
    with serving(opened, loaded, serve_options()) as served, ExitStack() as stack:
        others = [stack.enter_context(socket.socket()) for _ in range(3)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            for other in others:
                other.settimeout(60)
                other.connect((urlsplit(served.url).hostname, urlsplit(served.url).port))
                other.sendall(HEALTH)
            until(lambda: served.reported)
            time.sleep(0.15)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert all(other.recv(1 << 16).startswith(b"HTTP/1.1 200") for other in others)
        (error,) = served.reported
        assert "open files" in error.message and "ulimit -n" in error.hint


def test_other_errors_of_the_event_loop_are_not_quiet(caplog):
    app = type("App", (), {"state": type("State", (), {"expire": 0, "report": 0, "limits": ConnectionLimits()})})
    loop = asyncio.new_event_loop()
    server.HttpServer(app, 0, print)._failed(loop, {"message": "a defect", "exception": LookupError()})
    loop.close()
    assert "a defect" in caplog.text


@pytest.mark.parametrize(
    ("limits", "raised", "most", "backlog"),
    [((256, 4096), [1180], 584, 72), ((200, 200), [200], 72, 11), ((20, 20), [20], 8, 8), ((-1, -1), [], 584, 128)],
)
def test_the_limit_of_descriptors_is_raised_and_its_connections_counted(monkeypatch, limits, raised, most, backlog):
    """Of which 20 are in use."""
    changed = []
    monkeypatch.setattr(connections.os, "listdir", lambda path: ["a descriptor"] * 20)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: changed.append(values[0]))
    found = reserve_descriptors(72)
    assert (found.most, found.backlog, changed) == (most, backlog, raised) and 0 < found.requests < most


def test_a_body_in_chunks_is_read(served):
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    head = f"{POST}Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode()
    with raw_connection(served, head + body + b"\r\n0\r\n\r\n") as other:
        assert until_closed(other).startswith(b"HTTP/1.1 200")
