"""Memory that the bodies of requests hold together."""

import asyncio

import pytest
from starlette.requests import Request

from triforce_cli.serve import bodies
from triforce_cli.serve.api_errors import ApiError
from triforce_cli.serve.bodies import Bodies

MOST, TOGETHER = 300_000, 400_000


@pytest.fixture
def held(monkeypatch):
    monkeypatch.setattr(bodies, "_TIMES", 0)
    monkeypatch.setattr(bodies, "_TOGETHER", TOGETHER)
    return Bodies(MOST)


def request(*pieces, length=None):
    """Return a request whose body comes in pieces."""
    left = list(pieces)

    async def receive():
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    headers = [(b"content-type", b"application/json")]
    headers += [] if length is None else [(b"content-length", str(length).encode())]
    return Request({"type": "http", "headers": headers}, receive)


def refused(held, wanted):
    async def read():
        with held.place(wanted) as body:
            await body.read()

    with pytest.raises(ApiError) as caught:
        asyncio.run(read())
    return caught.value


def test_a_place_is_taken_before_a_byte_is_read_and_freed_afterwards(held):
    with held.place(request(length=MOST)):
        error = refused(held, request(length=200_000))
        assert (error.status, error.headers["retry-after"]) == (503, "1")
        with held.place(request(length=5)):  # counts with its buffer
            assert held.free == TOGETHER - MOST - (1 << 16)
    assert held.free == TOGETHER
    with pytest.raises(LookupError), held.place(request(length=MOST)):
        raise LookupError
    assert held.free == TOGETHER


def test_a_body_without_a_length_takes_what_it_needs(held):
    piece = b" " * 100_000
    with held.place(request(length=200_000)):
        assert refused(held, request(piece, piece, piece, b"")).status == 503
    assert refused(held, request(piece, piece, piece, piece, b"")).status == 413

    async def read():
        with held.place(request(piece, piece, b"")) as body:
            assert len(await body.read()) == 200_000
            assert held.free == TOGETHER - 200_000  # until the prompt is encoded

    asyncio.run(read())
    assert held.free == TOGETHER
