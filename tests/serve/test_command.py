"""The command line of `triforce serve`: what it refuses before the model is loaded, and a server from start to end."""

import os
import signal
import threading
import time

import httpx
import pytest

from tests.support.command import refused
from tests.support.rank_pool import free_port
from tests.support.serving import listener


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--host", "0.0.0.0"), ("no API key", "--api-key-file")),
        (("--cache-scope", "user"), ("--cache-scope is 'user'", "shared, key")),
        (("--context", "4K"), ("2,048 tokens", "--extend-context")),
        (("--api-key-file", "none.txt"), ("No such file",)),
        (("--port", "70000"), ("--port", "65535")),
        (("--verify",), ("no option --verify",)),
    ],
)
def test_what_cannot_work_is_one_error(triforce_here, args, words):
    refused(triforce_here("serve", *args), *words)


def test_a_port_that_is_taken_is_an_error_before_the_model_is_loaded(triforce_here):
    with listener() as taken:
        taken.listen()
        refused(triforce_here("serve", "--port", taken.getsockname()[1]), "cannot listen on 127.0.0.1", "--port 0")


def test_a_dry_run_prints_the_plan(triforce_here):
    answer = triforce_here("serve", "--context", 512, "--dry-run")
    assert answer.returncode == 0 and "512" in answer.stdout


def test_a_server_from_its_start_to_sigterm(triforce_here, handlers):
    port, key, found = free_port(), "a-key-of-this-test-0123", []

    def use():
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", verify=False, timeout=60) as client:
            while not found:
                try:
                    found.append(client.get("/health").status_code)
                except httpx.ConnectError:
                    time.sleep(0.02)
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
            headers = {"authorization": f"Bearer {key}"}
            found.append(client.post("/v1/chat/completions", json=body).status_code)
            found.append(client.post("/v1/chat/completions", json=body, headers=headers).status_code)
        os.kill(os.getpid(), signal.SIGTERM)

    client = threading.Thread(target=use, daemon=True)
    client.start()
    answer = triforce_here("serve", "--port", port, "--context", 512, "-v", env={"TRIFORCE_API_KEY": key})
    client.join(60)
    assert (answer.returncode, found) == (0, [200, 401, 200])
    assert f"http://127.0.0.1:{port}/v1" in answer.stderr and key not in answer.stderr and "Hello" not in answer.stderr
