"""Attack `triforce serve` on loopback as testers of a web server do: one line for each attack, with a verdict.

    python scripts/siege_serve.py
    python scripts/siege_serve.py --only smuggling origins --descriptors 1024

Starts a server of its own, with few file descriptors, and ends it. Every attack has a bounded number of connections and
ends by itself, all together in about two minutes. Exit code 1 if the server has failed against one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

COMMAND = [sys.executable, "-m", "triforce_cli", "serve", "--port", "0", "--context", "512", "--parallel", "2"]
COMPLETIONS = "/v1/completions"
MIB = 1 << 20
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
QUICK = 3  # seconds in which a server that is well answers
LOG = 4096  # bytes that an attack may write to the log


@dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen
    host: str
    port: int
    log: IO[bytes]

    @property
    def rss(self) -> int:
        """Bytes of memory of the process."""
        return psutil.Process(self.process.pid).memory_info().rss

    @property
    def logged(self) -> int:
        """Bytes of its log."""
        return Path(self.log.name).stat().st_size

    def connect(self, data: bytes = b"") -> socket.socket:
        """Return a connection on which some bytes have been sent."""
        found = socket.create_connection((self.host, self.port), timeout=QUICK)
        found.sendall(data)
        return found

    def status(self, method: str, path: str, body: bytes | Iterator[bytes] | None = None, **headers: str) -> int:
        """Return the status of a request, sent as Python's own client does: the whole of it before it reads."""
        client = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            client.request(method, path, body, {"Content-Type": "application/json"} | named)
            response = client.getresponse()
            response.read()
            return response.status
        finally:
            client.close()

    def is_well(self) -> bool:
        """Return whether it answers, and quickly."""
        try:
            with self.connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") as found:
                return found.recv(1 << 16).startswith(b"HTTP/1.1 200")
        except OSError:
            return False

    def answers(self) -> bool:
        """Return whether it generates."""
        body = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()
        return self.status("POST", COMPLETIONS, body) == 200


def until_closed(connections: list[socket.socket], seconds: float, piece: bytes = b"", gap: float = 0.5) -> list[bytes]:
    """Return what connections received that the server closed within `seconds`; send each a piece every `gap`."""
    got, left = dict.fromkeys(connections, b""), set(connections)
    selector = selectors.DefaultSelector()
    for each in connections:
        selector.register(each, selectors.EVENT_READ)
    end = time.monotonic() + seconds
    while left and time.monotonic() < end:
        ready = selector.select(gap)
        for key, _ in ready:
            each = key.fileobj
            data = b""
            with suppress(OSError):
                data = each.recv(1 << 16)
            got[each] += data
            if not data:
                left.discard(each)
                selector.unregister(each)
        for each in left if piece else ():
            with suppress(OSError):
                each.sendall(piece)
        if piece:
            time.sleep(gap if ready else 0)
    return [data for each, data in got.items() if each not in left]


def received(connection: socket.socket) -> bytes:
    """Return what has come on a connection so far."""
    connection.setblocking(False)
    with suppress(OSError):
        return connection.recv(1 << 16)
    return b""


def idle(server: Server) -> tuple[bool, str]:
    """More connections than the server has descriptors, which say nothing."""
    before, count = server.logged, 400
    with ExitStack() as stack:
        held = [stack.enter_context(server.connect()) for _ in range(count)]
        is_well = all(server.is_well() for _ in range(5)) and server.answers()
        closed = len(until_closed(held, 14))
    logged = server.logged - before
    return is_well and closed == count and logged < LOG, (
        f"{count} connections: well {is_well}, {closed} closed, {logged} bytes logged"
    )


def kept_alive(server: Server) -> tuple[bool, str]:
    """Connections that are idle after a request."""
    with ExitStack() as stack:
        request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        held = [stack.enter_context(server.connect(request)) for _ in range(50)]
        closed = until_closed(held, 14)
    answered = sum(data.startswith(b"HTTP/1.1 200") for data in closed)
    return answered == len(held), f"{len(held)} connections: {answered} answered and closed"


def slow_heads(server: Server) -> tuple[bool, str]:
    """Slowloris: heads of requests that come byte by byte, of a first and of a second request."""
    whole, part = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /health HTTP/1.1\r\nX: "
    first = [part, whole + part]
    with ExitStack() as stack:
        held = [stack.enter_context(server.connect(first[number % 2])) for number in range(100)]
        is_well = server.is_well()
        closed = len(until_closed(held, 14, b"x"))
    return is_well and closed == len(held), f"{len(held)} connections: well {is_well}, {closed} closed"


def slow_bodies(server: Server) -> tuple[bool, str]:
    """Bodies that come byte by byte."""
    with ExitStack() as stack:
        head = f"{HEAD}Content-Length: 100000\r\n\r\n".encode()
        held = [stack.enter_context(server.connect(head)) for _ in range(40)]
        is_well = server.is_well() and server.answers()
        closed = until_closed(held, 66, b" ")
    told = sum(data.startswith((b"HTTP/1.1 408", b"HTTP/1.1 503")) for data in closed)
    return is_well and told == len(held), f"{len(held)} bodies: well {is_well}, {told} told 408 or 503 and closed"


def large_bodies(server: Server) -> tuple[bool, str]:
    """Large bodies, all but their last byte."""
    size, before, most = 31 * MIB, server.rss, 0
    with ExitStack() as stack:
        head = f"{HEAD}Content-Length: {size}\r\n\r\n".encode()
        held = [stack.enter_context(server.connect(head)) for _ in range(40)]
        for each in held:
            with suppress(OSError):
                each.sendall(b" " * (size - 1))
            most = max(most, server.rss)
        is_well, answers = server.is_well(), [received(each) for each in held]
    grown, refused = (most - before) // MIB, [data for data in answers if data.startswith(b"HTTP/1.1 503")]
    has_hint = len(refused) >= 30 and all(b"retry-after" in data for data in refused)
    time.sleep(1)
    is_well = is_well and server.answers()
    return is_well and grown < 400 and has_hint, (
        f"{len(held)} x 31 MiB: memory +{grown} MiB, {len(refused)} told 503 and when to try again, well {is_well}"
    )


def too_large(server: Server) -> tuple[bool, str]:
    """Bodies over the limit, by a client that reads only after it has sent all: it must get to read the 413."""
    body, found = b" " * (33 * MIB), []
    pieces = lambda: iter([body[:MIB]] * 33)  # noqa: E731  # sent in chunks
    for content in (body, body, pieces(), pieces()):
        try:
            connection = ("keep-alive", "close")[len(found) % 2]
            found.append(server.status("POST", COMPLETIONS, content, Connection=connection))
        except OSError as error:
            found.append(type(error).__name__)
    return found == [413] * 4 and server.answers(), f"status {found}"


def smuggling(server: Server) -> tuple[bool, str]:
    """Two lengths of one body: a proxy in front could see another end of the request than the server."""
    chunked, inner = "Transfer-Encoding: chunked\r\n", "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    heads = [
        f"Content-Length: 5\r\n{chunked}",
        f"{chunked}Content-Length: 5\r\n",
        f"Transfer-Encoding: identity\r\nContent-Length: {len(inner) + 5}\r\n",
        f"Transfer-Encoding:\r\nContent-Length: {len(inner) + 5}\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: +5\r\n",
        "Content-Length: 0x5\r\n",
        f"Content-Length: {'5' * 5000}\r\n",
        "Transfer-Encoding : chunked\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: chunked, chunked\r\n",
    ]
    rest = f"\r\n0\r\n\r\n{inner}"
    requests = [f"{line} HTTP/1.1\r\nHost: localhost\r\n{head}{rest}" for head in heads for line in LINES]
    requests.append(f"{LINES[0]} HTTP/1.0\r\nHost: localhost\r\n{chunked}{rest}")
    wrong = []
    for request in requests:
        with server.connect(request.encode()) as each:
            got = (until_closed([each], QUICK) or [b"open"])[0]
        if not got.startswith(b"HTTP/1.1 400") or got.count(b"HTTP/1.1") != 1:
            wrong.append(request.partition("\r\nHost: localhost\r\n")[2].partition("\r\n0")[0])
    return not wrong, f"{len(requests)} requests: {len(wrong)} not refused {sorted(set(wrong)) or ''}"


LINES = ("POST /v1/completions", "GET /health")


def origins(server: Server) -> tuple[bool, str]:
    """Pages of other sites, and names of other machines."""
    own, other = f"{server.host}:{server.port}", f"{server.host}:{server.port + 1}"
    bad = [f"https://{own}", f"http://{other}", f"http://{server.host}", f"http://localhost:{server.port}", "null", ""]
    bad += [f"http://{own}.evil.example", f"http://evil@{own}", f"HTTP://{own}/", own, f"http://{own}#", f"ws://{own}"]
    wrong = [origin for origin in bad if server.status("GET", "/v1/models", Origin=origin) != 403]
    hosts = ["evil.example", f"127.0.0.1.evil.example:{server.port}", f"evil@{own}/", "", "0.0.0.0", "[::1", own + "0x"]
    wrong += [host for host in hosts if server.status("GET", "/v1/models", Host=host) not in (400, 421)]
    is_own = server.status("GET", "/v1/models", Origin=f"http://{own}") == 200
    return not wrong and is_own, f"{len(bad)} origins, {len(hosts)} hosts: allowed {wrong}; its own page {is_own}"


ATTACKS: list[Callable[[Server], tuple[bool, str]]] = [
    *(idle, kept_alive, slow_heads, slow_bodies, large_bodies, too_large, smuggling, origins),
]


def start(descriptors: int, log: IO[bytes]) -> Server:
    """Return a server that listens."""
    limits = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))  # noqa: E731
    process = subprocess.Popen(COMMAND, stderr=log, preexec_fn=limits)
    while process.poll() is None:
        if found := re.search(rb"http://([\d.]+):(\d+)", Path(log.name).read_bytes()):
            return Server(process, found[1].decode(), int(found[2]), log)
        time.sleep(0.05)
    raise SystemExit(f"the server has ended with {process.wait()}:\n{Path(log.name).read_text()}")


def run(attack: Callable[[Server], tuple[bool, str]], server: Server) -> bool:
    """Print the verdict on an attack; return whether the server has withstood it."""
    try:
        is_good, detail = attack(server)
    except OSError as error:
        is_good, detail = False, f"{type(error).__name__}: {error}"
    print(f"{'pass' if is_good else 'FAIL'}  {attack.__name__.replace('_', ' '):<13} {detail}", flush=True)
    return is_good


def main() -> None:
    names = [attack.__name__ for attack in ATTACKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ATTACK", help=", ".join(names))
    parser.add_argument("--descriptors", type=int, default=256, help="of the server")
    args = parser.parse_args()
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        server = start(args.descriptors, log)
        try:
            verdicts = [run(attack, server) for attack in ATTACKS if attack.__name__ in args.only]
        finally:
            server.process.send_signal(signal.SIGTERM)
            try:
                code = server.process.wait(60)
            except subprocess.TimeoutExpired:
                server.process.kill()
                code = server.process.wait()
        print(f"SIGTERM: exit code {code}, {server.logged} bytes logged")
    sys.exit(code or not all(verdicts))


if __name__ == "__main__":
    main()
