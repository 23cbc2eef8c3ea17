"""Balances requests over several `triforce serve`s, so that questions about one document meet the server that read it.

    python examples/balance.py 8080 http://10.0.0.1:8000 http://10.0.0.2:8000

A request goes to the server with the highest hash of its name and of how the prompt begins (rendezvous hashing). If
that one is not ready, its requests go to the next one; those of the others stay. `--round-robin` is for comparison.
It listens on this machine alone and speaks plain HTTP: put a proxy with TLS and limits in front of it.
"""

import asyncio
import hashlib
import itertools
import json
import sys
from contextlib import suppress
from urllib.parse import urlsplit

BEGINNING = 2048  # characters of a prompt that choose the server
CONNECT = 2.0  # seconds


def beginning(body: bytes) -> str:
    """Return how a request's prompt begins, with what stands before the document; the same for all its questions."""
    try:
        request = json.loads(body)
        messages = request.get("messages") or [{"content": request.get("prompt", "")}]
        return "".join(str(message.get("content", "")) for message in messages)[:BEGINNING]
    except (ValueError, AttributeError):  # no JSON: the server says so
        return ""


def by_prefix(servers: list[str], body: bytes) -> list[str]:
    """Return the servers in the order in which they are asked."""
    text = beginning(body)
    return sorted(servers, key=lambda server: hashlib.sha256(f"{server}\n{text}".encode()).digest(), reverse=True)


async def opened(server: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a server that is ready. Raises OSError, TimeoutError."""
    address = urlsplit(server)
    for path in ("/ready", None):
        reader, writer = await asyncio.wait_for(asyncio.open_connection(address.hostname, address.port), CONNECT)
        if path is None:
            return reader, writer
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n\r\n".encode())
        status = await asyncio.wait_for(reader.readline(), CONNECT)
        writer.close()
        if b" 200 " not in status:
            raise ConnectionError(f"{server} is not ready")


async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if b"\r\nconnection: close\r\n" not in head.lower():  # one request a connection
        head = head[:-2] + b"Connection: close\r\n\r\n"
    writer.write(head)
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, order) -> None:
    """Pass one request on, and its answer back as it comes; then close the connection."""
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        headers = dict(line.lower().split(b":", 1) for line in lines[1:] if line)
        body = await reader.readexactly(int(headers.get(b"content-length", 0)))
        for server in order(body):
            try:
                from_server, to_server = await opened(server)
                break
            except (OSError, asyncio.TimeoutError):
                continue
        else:
            writer.write(b"HTTP/1.1 503 no server is ready\r\nRetry-After: 2\r\nContent-Length: 0\r\n\r\n")
            return
        kept = [line for line in lines[1:] if line and line.lower().split(b":")[0] not in (b"host", b"connection")]
        host = b"Host: " + urlsplit(server).netloc.encode()
        to_server.write(b"\r\n".join([lines[0], host, b"Connection: close", *kept, b"", body]))
        # A client that leaves ends its sequence: its side is watched while the answer comes.
        tasks = [asyncio.create_task(each) for each in (copied(from_server, writer), reader.read(1))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        to_server.close()
    except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass
    finally:
        writer.close()


async def main(port: int, servers: list[str], is_affine: bool = True) -> None:
    turns = itertools.count()

    def in_turn(body: bytes) -> list[str]:
        first = next(turns) % len(servers)
        return servers[first:] + servers[:first]

    def order(body: bytes) -> list[str]:
        return by_prefix(servers, body) if is_affine else in_turn(body)

    listening = await asyncio.start_server(lambda *streams: answer(*streams, order), "127.0.0.1", port)
    print(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", flush=True)
    await listening.serve_forever()


if __name__ == "__main__":
    arguments = [each for each in sys.argv[1:] if each != "--round-robin"]
    if len(arguments) < 2 or not arguments[0].isdecimal():
        sys.exit(__doc__)
    with suppress(KeyboardInterrupt):
        asyncio.run(main(int(arguments[0]), arguments[1:], len(arguments) + 1 == len(sys.argv)))
