"""The command line of `triforce serve`: what it refuses before the model is loaded, and servers from start to end."""

import json
import re
import signal
import socket
import subprocess
from contextlib import contextmanager

import httpx
import pytest

from tests.support.command import COMMAND, environment, refused


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--host", "0.0.0.0"), ("no API key", "--api-key-file")),
        (("--cache-scope", "key"), ("--cache-scope", "leave it out")),
        (("--context", "4K"), ("2,048 tokens", "--extend-context")),
        (("--api-key-file", "none.txt"), ("No such file",)),
        (("--port", "70000"), ("--port", "65535")),
        (("--verify",), ("no option --verify",)),
        (("--tensor-parallel", "2"), ("runs on one device",)),
    ],
)
def test_what_cannot_work_is_one_error(triforce_here, args, words):
    refused(triforce_here("serve", *args), *words)


def test_a_port_that_is_taken_is_an_error_before_the_model_is_loaded(triforce_here):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused(triforce_here("serve", "--port", taken.getsockname()[1]), "cannot listen on 127.0.0.1", "--port 0")


def test_a_dry_run_prints_the_plan(triforce_here):
    answer = triforce_here("serve", "--context", 512, "--dry-run")
    assert answer.returncode == 0 and "512" in answer.stdout


def test_of_several_gpus_the_first_one_serves(triforce_here, monkeypatch):
    starts = "triforce_cli.run.opened_request.ranks_to_start"  # as where both GPUs are there
    monkeypatch.setattr(starts, lambda settings: 0 if settings.parallel.tensor_parallel == 1 else 2)
    answer = triforce_here("serve", "--gpu", "2x-rtx-4090", "--context", 512, "--dry-run")
    assert answer.returncode == 0 and "the first one is used" in answer.stderr, answer.stderr


@contextmanager
def server(model, home, *options):
    """Yield a process that listens, and a client of it."""
    command = [*COMMAND, "serve", "--dtype", "float32", "--threads", "1", "--port", "0", *options]
    env = environment(home, model)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env, cwd=home)
    try:
        line = process.stderr.readline()
        found = re.search(rb"http://127\.0\.0\.1:\d+", line)
        assert found, line
        with httpx.Client(base_url=found[0].decode(), verify=False, timeout=60) as client:
            yield process, client
    finally:
        process.kill()
        process.wait(60)
        process.stderr.close()


def texts(response):
    """Yield the texts of a stream, and its error."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            yield event["error"]["message"] if "error" in event else event["choices"][0]["text"]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("drain", "signals"), [(600, 1), (0, 1), (600, 2)], ids=["drained", "cut", "at once"])
def test_signals_end_the_server(endless, tmp_path, number, drain, signals):
    count = 1900 if drain == 0 or signals == 2 else 100
    body = {"prompt": "Once", "max_tokens": count, "temperature": 0, "stream": True}
    with server(endless, tmp_path, "--drain", str(drain)) as (process, client):
        with client.stream("POST", "/v1/completions", json=body) as response:
            stream = texts(response)
            found = [next(stream)]
            process.send_signal(number)
            if signals == 2:
                found += [next(stream) for _ in range(20)]  # it goes on
                process.send_signal(number)
            try:
                found += stream
            except httpx.HTTPError:
                assert signals == 2
        code, stderr = process.wait(60), process.stderr.read().decode().splitlines()
        assert code == 0 and stderr[-1].startswith("ended after 1 answer of ")
        assert len(stderr) == 2 - (signals == 2) and ("POST /v1/completions 200 · " in stderr[0] or signals == 2)
    if drain == 0:
        assert found[-1] == "the server is shutting down"
    elif signals == 1:
        assert len("".join(found)) > 90
