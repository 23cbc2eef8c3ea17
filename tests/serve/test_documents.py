"""POST /documents: files that the page sends, read as the command line reads them."""

import re
import threading

import pytest

from offload.errors import PromptError
from tests.support.serving import raw_connection
from tests.support.waiting import until
from triforce_cli.input import converters
from triforce_cli.serve import encoding_threads

TYPE = {"content-type": "application/octet-stream"}
TEXT = "Über den König, dem König – “naïve”"


def sent(client, data, name="book.txt", **headers):
    return client.post("/documents", params={"name": name}, content=data, headers=TYPE | headers)


def message(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("encoding", "warning"), [("utf-8", None), ("utf-16", None), ("cp1252", "book.txt is not UTF-8; read as cp1252")]
)
def test_a_text_comes_back_decoded_with_its_tokens(client, opened, encoding, warning):
    found = sent(client, f"{TEXT}\r\n".encode(encoding), "C:\\Über\\book.txt").json()
    tokens = len(opened.model.tokenizer.encode(f"{TEXT}\n", False))
    warnings = found.pop("warnings")
    assert found == {"name": "book.txt", "text": f"{TEXT}\n", "tokens": tokens}
    assert [each[: len(warning)] for each in warnings] == [warning] if warning else warnings == []


@pytest.mark.parametrize(
    ("data", "name", "words"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0", "a.png", "a.png is no text: not valid utf-8"),
        (b"text \0 and more", "../\x1b[2Ja", "[2Ja is binary (it holds NUL bytes); give plain text"),
        (b"plain", "book.pdf", "book.pdf is not a PDF, although its name says so"),
        (b" \n", "", "the document is empty"),
        (b"king " * 600, "book.txt", "with a question and its answer it may have 512 tokens"),
    ],
)
def test_what_is_no_text_or_too_long_is_refused(client, data, name, words):
    assert words in message(sent(client, data, name))


def test_without_the_extra_the_error_says_which_one_to_install(client, monkeypatch):
    monkeypatch.setattr(converters, "find_spec", lambda name: None)
    found = message(sent(client, b"%PDF-1.7 ...", "book.pdf"))
    assert found.startswith("book.pdf is a PDF") and 'pip install ".[documents]"' in found


def test_other_pages_large_bodies_and_other_types_are_refused(client):
    assert sent(client, b"x", origin="https://evil.example").status_code == 403
    assert sent(client, b"x", host="evil.example").status_code == 421
    message(sent(client, b"x" * 20_001), 413)
    for kind in ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded", ""):
        refusal = message(client.post("/documents", content=b"x", headers={"content-type": kind}), 415)
        assert "curl needs -H 'Content-Type: application/octet-stream'" in refusal


def test_few_are_read_at_a_time(client, monkeypatch):
    going, go = threading.Semaphore(0), threading.Event()

    def slow(data, *others):
        going.release()
        assert go.wait(60)
        return data.decode()

    monkeypatch.setattr(encoding_threads, "text_of", slow)
    statuses = []
    threads = [
        threading.Thread(target=lambda: statuses.append(sent(client, b"king").status_code))
        for _ in range(encoding_threads.MOST)
    ]
    for thread in threads:
        thread.start()
    try:
        assert all(going.acquire(timeout=60) for _ in threads)
        refused = sent(client, b"king")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    finally:
        go.set()
    for thread in threads:
        thread.join(60)
    assert statuses == [200] * encoding_threads.MOST and sent(client, b"king").status_code == 200


def sending(served, data=b"king"):
    """Send a document, and return the connection."""
    head = f"POST /documents HTTP/1.1\r\nhost: {served.url.removeprefix('http://')}\r\n"
    kind = f"content-length: {len(data)}\r\ncontent-type: application/octet-stream\r\n\r\n"
    return raw_connection(served, (head + kind).encode() + data)


def test_who_leaves_gives_the_place_back_when_the_reading_has_ended(served, client, monkeypatch):
    going, go, before = threading.Semaphore(0), threading.Event(), closed(client)

    def slow(data, *others):
        going.release()
        assert go.wait(60)
        raise PromptError("nobody hears of it", "")

    monkeypatch.setattr(encoding_threads, "text_of", slow)
    try:
        for _ in range(encoding_threads.MOST):
            with sending(served):
                assert going.acquire(timeout=60)
        until(lambda: closed(client) == before + encoding_threads.MOST)
        assert sent(client, b"king").status_code == 503
    finally:
        go.set()
    monkeypatch.undo()
    until(lambda: sent(client, b"king").status_code == 200)


def closed(client):
    """Return how many documents nobody waited for."""
    found = re.search(r'requests_total{path="/documents",status="499"} (\d+)', client.get("/metrics").text)
    return 0 if found is None else int(found[1])
