"""A store at a real S3 server on this machine (moto): shared prompts, and what goes wrong on the way to it."""

import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from offload.errors import Degraded
from offload.prompt_cache import store as stores
from tests.support.prompt_cache import LENGTH, complaints, files

pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

BLOCKS = LENGTH // 128


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on to the server, through `fault`, which may change an answer, wait, or break it off."""

    protocol_version = "HTTP/1.1"

    def _pass(self):
        sent = self.rfile.read(int(self.headers.get("content-length") or 0))
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port)
        connection.request(self.command, self.path, sent, dict(self.headers))
        answer = connection.getresponse()
        data, status = answer.read(), answer.status
        is_block = self.command == "GET" and "safetensors" in self.path
        status, data, length = self.server.fault(self.command, is_block, status, data)
        self.send_response(status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header(
            "content-length", str(answer.getheader("content-length") if self.command == "HEAD" else length)
        )
        self.end_headers()
        self.wfile.write(data)
        if length != len(data):
            self.close_connection = True

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass

    def log_message(self, *more):
        pass


@pytest.fixture(scope="module")
def server():
    found = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    found.start()
    yield found.get_host_and_port()[1]
    found.stop()


@pytest.fixture
def url():
    return "s3://bucket/prompts"


@pytest.fixture(autouse=True)
def proxy(server, monkeypatch):
    import fsspec

    found = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    found.port, found.fault = server, sound
    threading.Thread(target=found.serve_forever, args=(0.05,), daemon=True).start()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": f"http://127.0.0.1:{found.server_port}"})
    fs = fsspec.filesystem("s3", skip_instance_cache=True)
    if fs.exists("bucket"):
        fs.rm("bucket", recursive=True)
    fs.mkdir("bucket")
    yield found
    found.shutdown()
    found.server_close()


def sound(command, is_block, status, data):
    return status, data, len(data)


def test_another_machine_restores_what_one_has_saved(machine, plain, tmp_path, recwarn):
    assert machine("a") == (plain, 0)
    assert machine("b") == (plain, 128 * BLOCKS)
    assert [path.read_bytes() for path in files(tmp_path / "a")] == [
        path.read_bytes() for path in files(tmp_path / "b")
    ]
    assert not complaints(recwarn)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda command, is_block, status, data: (500, b"", 0) if is_block else (status, data, len(data)), ""),
        (
            lambda command, is_block, status, data: (
                (status, data[: len(data) // 2], len(data)) if is_block else (status, data, len(data))
            ),
            "",
        ),
        (
            lambda command, is_block, status, data: (
                (status, data[:-9] + b"wrong" + data[-4:], len(data)) if is_block else (status, data, len(data))
            ),
            "checksum",
        ),
    ],
    ids=["500", "cut", "wrong"],
)
def test_a_fault_is_a_warning_and_the_text_stays(machine, plain, proxy, fault, reason):
    machine("a")
    proxy.fault = fault
    with pytest.warns(Degraded, match=reason or "the cache store"):
        assert machine("b") == (plain, 0)
    proxy.fault = sound
    assert machine("c") == (plain, 128 * BLOCKS)


def test_a_slow_server_delays_a_prompt_by_a_bounded_time(machine, plain, proxy, monkeypatch):
    machine("a")
    delays, fetch = [], stores.BlockStore.fetch

    def timed(self, *more):
        start = time.monotonic()
        fetch(self, *more)
        delays.append(time.monotonic() - start)

    def slow(command, is_block, status, data):
        time.sleep(8 * is_block)
        return status, data, len(data)

    monkeypatch.setattr(stores, "PATIENCE", 2.0)
    monkeypatch.setattr(stores.BlockStore, "fetch", timed)
    proxy.fault = slow
    with pytest.warns(Degraded, match="took more than 2 s"):
        assert machine("b") == (plain, 0)
    print(f"delayed by {delays[0]:.2f} s")
    assert delays[0] < stores.PATIENCE + 1


def test_no_such_bucket(machine, plain):
    with pytest.warns(Degraded, match="bucket does not exist"):
        assert machine("a", url="s3://missing/prompts") == (plain, 0)


def test_no_server_at_all(machine, plain, monkeypatch):
    import fsspec

    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": "http://127.0.0.1:9"})
    start = time.monotonic()
    with pytest.warns(Degraded, match="the cache store"):
        assert machine("a") == (plain, 0)
    print(f"all took {time.monotonic() - start:.1f} s")


def test_two_writers_at_once_leave_sound_blocks(run_both, machine, plain):
    assert run_both() == [plain, plain]
    assert machine("c") == (plain, 128 * BLOCKS)
