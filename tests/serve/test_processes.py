"""The server in a process of its own: killed in the middle of an answer, and told twice to end."""

import os
import signal
import socket
import threading
import time
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import httpx
import pytest

from offload import GenerationConfig, Sampling
from offload.prompt_cache.fingerprint import TOKENS
from offload.system.files import TEMPORARY
from tests.support.engine import tokens
from tests.support.models import make_hf_model, make_tokenizer
from tests.support.server_process import server_process
from tests.support.serving import opened_model
from tests.support.waiting import until

BOOK, OTHER = ("".join(f"{word} number {n}, " for n in range(200)) for word in ("page", "leaf"))
LONG = 1200  # tokens


@pytest.fixture(scope="module")
def bookish(tmp_path_factory):
    """A tiny model for long prompts, whose answers are as long as asked for."""
    folder = tmp_path_factory.mktemp("served") / "bookish"
    make_hf_model("llama", head_dim=32, max_position_embeddings=8192, eos_token_id=None).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def wanted(prompt, count=16):
    return {"prompt": prompt, "max_tokens": count, "temperature": 0}


def temporary_files(home):
    return list(home.rglob(f"{TEMPORARY}*"))


def blocks(home):
    return len(list(home.rglob("*.safetensors")))


@pytest.fixture(scope="module")
def alone(bookish):
    """Return the engine's own answer to a prompt, and the prompt's tokens; without a prompt cache."""
    opened = opened_model(bookish)
    engine, tokenizer = opened.model.load(), opened.model.tokenizer

    def answer(prompt, count=16):
        ids = tokenizer.encode(prompt, True)
        events = engine.generate(ids, Sampling(temperature=0), GenerationConfig(max_new_tokens=count))
        return tokenizer.decode(tokens(events)), len(ids)

    return answer


@pytest.mark.long
def test_kill_9_in_an_answer_leaves_an_intact_prompt_cache(bookish, alone, tmp_path):
    """While one answer streams and another prompt is being read and saved."""
    with server_process(bookish, tmp_path, "--cache") as server:
        with server.streaming(**wanted(BOOK, LONG)) as texts:
            assert next(texts)
            saved = blocks(tmp_path)
            threading.Thread(target=lambda: ask_in_vain(server, wanted(OTHER)), daemon=True).start()
            until(lambda: blocks(tmp_path) > saved or temporary_files(tmp_path))
            server.process.kill()
        assert server.ended() == (-signal.SIGKILL, "")

    (next(tmp_path.rglob("*.safetensors")).parent / f"{TEMPORARY}left").write_bytes(b"a part")
    for path in temporary_files(tmp_path):
        os.utime(path, (time.time() - 7200,) * 2)  # as old as one that nobody writes any more
    with server_process(bookish, tmp_path, "--cache") as server:
        for prompt in (BOOK, OTHER):
            found = server.client.post("/v1/completions", json=wanted(prompt)).json()
            text, length = alone(prompt)
            assert (found["choices"][0]["text"], found["usage"]["prompt_tokens"]) == (text, length)
            cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == saved * TOKENS if prompt == BOOK else cached % TOKENS == 0
        assert blocks(tmp_path) == 2 * saved > 2 and temporary_files(tmp_path) == []


def ask_in_vain(server, body):
    with suppress(httpx.HTTPError):
        server.client.post("/v1/completions", json=body)


@pytest.mark.daily("15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_streams_at_once(bookish, tmp_path, number):
    """The first one lets them go on, and refuses new ones. What is no HTTP leaves nothing in the log."""
    with server_process(bookish, tmp_path, "--drain", "600") as server, ExitStack() as streams:
        both = [streams.enter_context(server.streaming(**wanted("Once", 8000))) for _ in range(2)]
        for texts in both:
            assert next(texts) is not None
        with socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port)) as other:
            other.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
            assert other.recv(1 << 16).startswith(b"HTTP/1.1 400")
        server.process.send_signal(number)
        until(lambda: refuses(server.url))
        for texts in both:
            assert [next(texts) for _ in range(20)]  # they go on
        server.process.send_signal(number)
        assert server.ended() == (0, "")
        for texts in both:
            left = list(texts)
            assert len(left) < 7000 and left[-1] == "the server is shutting down"


def refuses(url):
    try:
        httpx.get(f"{url}/health", verify=False, timeout=60)
    except httpx.HTTPError:  # one that was accepted just before is broken off
        return True
    return False
