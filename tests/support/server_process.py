"""`triforce serve` in a process of its own, for what only a process can show: kills, signals, exit codes."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.command import COMMAND, environment

_ADDRESS = re.compile(rb"http://127\.0\.0\.1:\d+")


@dataclass
class ServerProcess:
    """A server that listens; `client` speaks to it."""

    process: subprocess.Popen
    url: str
    client: httpx.Client

    @contextmanager
    def streaming(self, **body) -> Iterator[Iterator[str]]:
        """Yield the texts of a streamed completion, and of an error; they end however the connection does."""
        with self.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            yield _texts(response)

    def ended(self) -> tuple[int, str]:
        """Wait until the process has ended; return its exit code, and what it has written since it listened."""
        code = self.process.wait(60)
        return code, self.process.stderr.read().decode()


def _texts(response: httpx.Response) -> Iterator[str]:
    try:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                yield event["error"]["message"] if "error" in event else event["choices"][0]["text"]
    except httpx.HTTPError:
        pass


@contextmanager
def server_process(model: Path, home: Path, *options: str) -> Iterator[ServerProcess]:
    """Start a server on a free port; kill it where the test has not ended it."""
    sizes = ("--dtype", "float32", "--threads", "1", "--port", "0")
    command = [*COMMAND, "serve", *sizes, *options]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment(home, model), cwd=home
    )
    try:
        line = process.stderr.readline()
        found = _ADDRESS.search(line)
        assert found, line
        with httpx.Client(base_url=found[0].decode(), verify=False, timeout=60) as client:
            yield ServerProcess(process, found[0].decode(), client)
    finally:
        process.kill()
        process.wait(60)
        process.stderr.close()
