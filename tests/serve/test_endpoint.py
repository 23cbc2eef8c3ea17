"""The endpoint on a loopback address, as clients see it: openai's own, and raw requests."""

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from offload import GenerationConfig, Sampling
from offload.speculation.sampling.warp import Sampler
from tests.support.engine import tokens
from tests.support.models import TEMPLATE
from tests.support.serving import connected, opened_model, raw_connection, serve_options, serving, until_closed
from tests.support.waiting import until
from triforce_cli.serve import api_request, bodies, responses
from triforce_cli.serve.api_errors import event_text
from triforce_cli.serve.server_metrics import ServerMetrics

LONG = 400  # tokens
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
TEXTS = [f"Once upon a time, in the {place} of the king," for place in ("house", "garden", "tower", "stable", "well")]


def answer(opened, loaded, ids, count=24):
    """Return the engine's own greedy text."""
    events = loaded.generate(ids, Sampling(temperature=0), GenerationConfig(max_new_tokens=count))
    return opened.model.tokenizer.decode(tokens(events))


def cancelled(client):
    lines = client.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith('triforce_sequences_total{reason="cancelled"')
    )


def test_a_chat_is_that_of_the_command_line(api, endless, triforce_here):
    arguments = ("--model", endless, "--temperature", 0, "-n", 24, "--quiet")
    expected = triforce_here("generate", TEXTS[0], *arguments).stdout
    found = api.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": TEXTS[0]}], temperature=0, max_tokens=24
    )
    assert found.choices[0].message.content.strip("\n") == expected.strip("\n")
    assert (found.choices[0].finish_reason, found.usage.completion_tokens) == ("length", 24)
    assert found.usage.total_tokens == found.usage.prompt_tokens + 24


def test_streams_that_run_together_are_what_each_is_alone(api, opened, loaded):
    def streamed(text):
        options = {"include_usage": True, "include_statistics": True}
        stream = api.completions.create(
            model="tiny", prompt=text, temperature=0, max_tokens=24, stream=True, stream_options=options
        )
        chunks = list(stream)
        assert chunks[-1].usage.completion_tokens == 24 and chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-2].statistics["new_tokens"] == 24
        return "".join(choice.text for chunk in chunks for choice in chunk.choices)

    with ThreadPoolExecutor(len(TEXTS)) as pool:
        found = list(pool.map(streamed, TEXTS))
    assert found == [answer(opened, loaded, opened.model.tokenizer.encode(text, True)) for text in TEXTS]


def test_a_conversation_is_in_the_chat_template(api, opened, loaded):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "is it?"}]},
        {"role": "assistant", "content": "Nobody <|im_end|>"},
        {"role": "user", "content": "Why?"},
    ]
    found = api.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_completion_tokens=9, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in found)
    tokenizer = opened.model.tokenizer
    plain = lambda text: tokenizer._encode(text, False, True).ids  # noqa: E731
    control = lambda text: tokenizer.encode(text, False)  # noqa: E731
    ids = [
        *control("<|im_start|>system\n"),
        *plain("Be brief."),
        *control("<|im_end|>\n<|im_start|>user\n"),
        *plain("Who is it?"),
        *control("<|im_end|>\n<|im_start|>assistant\n"),
        *plain("Nobody <|im_end|>"),
        *control("<|im_end|>\n<|im_start|>user\n"),
        *plain("Why?"),
        *control("<|im_end|>\n<|im_start|>assistant\n"),
    ]
    assert text == answer(opened, loaded, ids, 9)


def test_choices_prompts_seeds_and_stops(client, opened, loaded):
    wanted = {"prompt": TEXTS[:2], "max_tokens": 12, "temperature": 1, "seed": 5, "n": 2}
    first, again = (client.post(COMPLETIONS, json=wanted).json() for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]] and len(set(texts)) == 4
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert first["usage"]["completion_tokens"] == 48
    seeded = {"prompt": opened.model.tokenizer.encode(TEXTS[0], True), "max_tokens": 12, "temperature": 1, "seed": 6}
    assert client.post(COMPLETIONS, json=seeded).json()["choices"][0]["text"] == texts[1]

    text = answer(opened, loaded, opened.model.tokenizer.encode(TEXTS[0], True))
    stop = text[len(text) // 2 :][:3]
    stopped = client.post(
        COMPLETIONS, json={"prompt": TEXTS[0], "max_tokens": 24, "temperature": 0, "stop": stop}
    ).json()
    assert stopped["choices"][0]["text"] == text[: text.index(stop)]
    assert stopped["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (COMPLETIONS, {"prompt": "a", "echo": True}, "echo is not supported"),
        (COMPLETIONS, {"prompt": "a", "tempratur": 1}, "did you mean temperature?"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature is -1"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": True}, "give a whole number"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 600}, "both together may have 512"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}, "and both are given"),
        (COMPLETIONS, {"prompt": "a", "n": 17}, "1 to 16 are possible"),
        (COMPLETIONS, {"prompt": "a", "stop": [1]}, "stop"),
        (COMPLETIONS, {"prompt": [1, 267]}, "token id 267 at position 1"),
        (COMPLETIONS, {"prompt": ""}, "prompt is no text"),
        (COMPLETIONS, {}, "prompt is no text"),
        (COMPLETIONS, b'{"prompt": "\\ud800"}', "half a surrogate pair"),
        (COMPLETIONS, b'{"\\ud800": 1}', r"unknown field '\ud800'"),
        (COMPLETIONS, b"[" * 10_000, "not valid JSON"),
        (COMPLETIONS, b'{"prompt": "a", "top_p": NaN}', "NaN"),
        (
            COMPLETIONS,
            {"prompt": "a", "stream_options": {"include_use": True}},
            "unknown 'include_use' in stream_options",
        ),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": "text", "strict": 1}}, "unknown 'strict'"),
        (CHAT, {"messages": [], "max_tokens": 1}, "no list of 1 to 4,096 messages"),
        (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": [], "content": "a"}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": {}, "content": "a"}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "list of text parts"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools[0] is no object"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}},
            "no end-of-sequence token",
        ),
    ],
)
def test_what_is_not_supported_is_refused(client, path, body, words):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400 and words in error["message"]
    assert sorted(error) == ["code", "message", "param", "type"]


def test_the_field_that_is_too_large_is_named(client):
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body, param, words in (
        (CHAT, chat | {"max_tokens": 600}, "max_tokens", "max_tokens is 600 and the prompt has"),
        (COMPLETIONS, {"prompt": "a", "max_completion_tokens": 600}, "max_tokens", "max_tokens is 600"),
        (COMPLETIONS, {"prompt": [1] * 511 + [2]}, "prompt", "the prompt has 512 tokens"),
        (COMPLETIONS, {"prompt": "the cat " * 250}, "prompt", "tokens; with the answer it may have 512"),
    ):
        error = client.post(path, json=body).json()["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded") and words in error["message"]


def test_unknown_fields_are_passed_over_on_request(opened, loaded):
    body = {"prompt": "a", "max_tokens": 1, "reasoning_effort": "low"}
    with serving(opened, loaded, serve_options(ignore_unknown=True)) as served, connected(served) as client:
        assert client.post(COMPLETIONS, json=body).status_code == 200


def test_a_huge_name_is_not_sent_back(client):
    for body, status in (({"temperature" * 900: 1}, 400), ({"model": "m" * 9000, "prompt": "a"}, 404)):
        response = client.post(COMPLETIONS, json=body)
        assert response.status_code == status and len(response.content) < 800
    assert "did you mean" not in client.post(COMPLETIONS, json={"temperatur" + "e" * 60: 1}).text


def test_the_model_and_other_paths(client, api):
    from openai import NotFoundError

    assert [model.id for model in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").id == "tiny"
    with pytest.raises(NotFoundError):
        api.completions.create(model="gpt", prompt="a")
    for response in (client.get("/v1/nothing"), client.get(CHAT)):
        assert response.status_code in (404, 405) and "message" in response.json()["error"]
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}


def test_a_request_that_is_too_large_or_no_json_is_not_read(client):
    large = {"prompt": "a" * 21_000}
    assert client.post(COMPLETIONS, json=large).status_code == 413
    pieces = (b" " * 1000 for _ in range(30))  # without a Content-Length
    assert client.post(COMPLETIONS, content=pieces, headers={"content-type": "application/json"}).status_code == 413
    assert client.post(COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415


def test_a_body_that_stops_coming_is_refused_and_its_connection_closed(served, monkeypatch):
    """And one that comes too slowly."""
    monkeypatch.setattr(bodies, "SECONDS", 0.1)
    head = f"{HEAD}Content-Length: 5000\r\n\r\n".encode()
    with raw_connection(served, head) as silent, raw_connection(served, head) as slow:
        slow.settimeout(0.01)
        while not (received := _received(slow)):
            slow.sendall(b" ")
        slow.settimeout(60)
        for answer in (received + until_closed(slow), until_closed(silent)):
            assert answer.startswith(b"HTTP/1.1 408") and b"the request has not come within 0.1 seconds" in answer


def _received(connection):
    try:
        return connection.recv(1 << 16)
    except TimeoutError:
        return b""


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_ends_its_sequence(served, client, stream):
    before = cancelled(client)
    body = json.dumps({"prompt": TEXTS[0], "max_tokens": LONG, "stream": stream}).encode()
    with raw_connection(served, f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body) as other:
        assert until(lambda: served.engine.num_running == 1)
        assert not stream or other.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert until(lambda: cancelled(client) == before + 1)
    assert served.engine.num_running == served.engine.num_waiting == 0  # its place was free before it was counted


def test_an_error_of_the_server_is_counted_reported_and_kept_from_the_client(client, served, opened, monkeypatch):
    def broken(*args):
        raise LookupError("a secret of the server")

    served.reported.clear()
    with monkeypatch.context() as patches:
        patches.setattr(ServerMetrics, "text", broken)
        response = client.get("/metrics")
    assert (response.status_code, response.headers["x-content-type-options"]) == (500, "nosniff")
    assert "secret" not in response.text and 'path="/metrics",status="500"} 1.0' in client.get("/metrics").text
    with monkeypatch.context() as patches:
        patches.setattr(responses, "usage", broken)
        assert client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 500
        patches.setattr(responses, "statistics", broken)
        body = {"prompt": "a", "max_tokens": 1, "stream": True, "stream_options": {"include_statistics": True}}
        assert "server_error" in client.post(COMPLETIONS, json=body).text
    assert [type(error) for error in served.reported] == [LookupError] * 3


def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(client, monkeypatch):
    monkeypatch.setattr(api_request, "_object", None)
    content = b"[" + b"[]," * 70_000 + b"[]]"
    response = client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


def test_an_error_in_a_pass_ends_its_request_and_the_server_goes_on(client, served, loaded, monkeypatch):
    served.reported.clear()

    def broken(*args):
        raise RuntimeError("a secret of the server")

    body = {"prompt": TEXTS[0], "max_tokens": 4}
    with monkeypatch.context() as patches:
        patches.setattr(loaded.model, "embed", broken)
        response = client.post(COMPLETIONS, json=body)
        streamed = client.post(COMPLETIONS, json=body | {"stream": True})
        several = client.post(COMPLETIONS, json=body | {"n": 2})
    assert (response.status_code, several.status_code) == (500, 500) and "secret" not in response.text
    assert [type(error.__cause__) for error in served.reported] == [RuntimeError] * 4
    last = json.loads(streamed.text.rstrip().splitlines()[-1].removeprefix("data: "))
    assert last["error"]["type"] == "server_error"
    assert client.post(COMPLETIONS, json=body).status_code == 200


def test_an_exception_of_one_request_leaves_those_beside_it(client, served, monkeypatch):
    served.reported.clear()
    made, defective = Sampler.__init__, 13

    def new(sampler, sampling, seed, *args, **more):
        made(sampler, sampling, seed, *args, **more)
        if seed == defective:
            sampler.choose = sampler.distribution = lambda *args, **more: [][seed]

    bodies = [{"prompt": text, "max_tokens": 24, "temperature": 0} for text in TEXTS[:3]]
    expected = [client.post(COMPLETIONS, json=body).json()["choices"] for body in bodies]
    monkeypatch.setattr(Sampler, "__init__", new)
    bodies[1] |= {"seed": defective}
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda body: client.post(COMPLETIONS, json=body), bodies))
    assert found[1].status_code == 500 and found[1].json()["error"]["message"].startswith("an internal error")
    assert [found[place].json()["choices"] for place in (0, 2)] == expected[::2]
    (error,) = served.reported
    assert error.message == "IndexError: list index out of range"
    refused = client.post(COMPLETIONS, json=bodies[0] | {"dry_multiplier": 1e-320})
    assert refused.status_code == 400 and "dry_multiplier is 1e-320" in refused.json()["error"]["message"]


def test_an_idle_engine_sleeps(served):
    assert until(lambda: served.engine.num_running == served.engine.num_waiting == 0)
    clock = time.pthread_getcpuclockid(served.engine._thread.ident)

    def is_quiet():  # for a while: what ended last may still be counted
        before = time.clock_gettime(clock)
        time.sleep(0.1)
        return time.clock_gettime(clock) - before < 0.02

    assert until(is_quiet)


def test_metrics_count_tokens_and_responses(client):
    def value(name):
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = (
        value("triforce_generated_tokens_total"),
        value('triforce_requests_total{path="/v1/completions",status="200"}'),
    )
    client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 7})
    until(lambda: value("triforce_generated_tokens_total") == before[0] + 7)  # an answer is sent before it is counted
    assert value('triforce_requests_total{path="/v1/completions",status="200"}') == before[1] + 1
    assert value("triforce_resident_memory_bytes") > 1e6


def test_more_than_the_queue_holds_is_refused_and_the_rest_answered(opened, loaded, monkeypatch):
    """The first of three sequences is held after its first event, until the fourth has been refused."""
    refused, generate_batch = threading.Event(), loaded.generate_batch

    def held(requests, parallel):
        for event in generate_batch(requests, parallel):
            yield event
            refused.wait(60)

    monkeypatch.setattr(loaded, "generate_batch", held)
    body = {"prompt": TEXTS[0], "max_tokens": 8, "temperature": 0}
    with serving(opened, loaded, serve_options(parallel=1, queue=2)) as served, connected(served) as client:
        with ThreadPoolExecutor(3) as pool:
            answered = [pool.submit(client.post, COMPLETIONS, json=body) for _ in range(3)]
            assert until(lambda: served.engine.num_waiting == 2)
            response = client.post(COMPLETIONS, json=body)
            statuses = [client.get(path).status_code for path in ("/health", "/ready")]
            refused.set()
            texts = {each.result().json()["choices"][0]["text"] for each in answered}
        assert statuses == [200, 503]  # it lives, and another server should be asked
        assert response.status_code == 429 and 1 <= int(response.headers["retry-after"]) <= 60
        assert texts == {answer(opened, loaded, opened.model.tokenizer.encode(TEXTS[0], True), 8)}
        assert client.post(COMPLETIONS, json=body | {"n": 4}).status_code == 400  # never all of them at once


def test_prompts_that_begin_alike_are_run_once(model_dir, tiny_model_dir):
    """On the native kernel, with the pages of the sequence that has ended last."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny_model_dir / name).exists() and not (model_dir / name).exists():
            (model_dir / name).write_bytes((tiny_model_dir / name).read_bytes())
    opened = opened_model(model_dir)
    if opened.model.kernel == "off":
        pytest.skip("there is no native kernel here")
    keys = ("first-key-0123456789", "other-key-0123456789")
    options = serve_options(*keys, separates_keys=True)
    with serving(opened, opened.model.load(), options) as served, connected(served) as client:

        def cached(key, question):
            body = {"prompt": "x" * 300 + question, "max_tokens": 2, "temperature": 0}
            headers = {"authorization": f"Bearer {key}"}
            found = client.post(COMPLETIONS, json=body, headers=headers).json()
            return found["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached(keys[0], "who?"), cached(keys[0], "why?")] == [0, 302]
        assert cached(keys[1], "why?") == 0


def test_thinking_is_apart_from_the_answer(endless, tmp_path):
    """The template opens the thinking, which the tiny model never closes."""
    folder = tmp_path / "thinks"
    shutil.copytree(endless, folder)
    template = folder / "chat_template.jinja"
    template.write_text(TEMPLATE.replace("assistant\n", "assistant\n<think>\n{% if enable_thinking %}{% endif %}"))
    opened = opened_model(folder)
    loaded = opened.model.load()
    expected = answer(opened, loaded, opened.model.tokenizer.chat("Why?", None), 12).strip()
    body = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 12, "temperature": 0}
    with serving(opened, loaded, serve_options()) as served, connected(served) as client:
        switched = client.post(CHAT, json=body | {"chat_template_kwargs": {"enable_thinking": True}})
        message = switched.json()["choices"][0]["message"]
        streamed = client.post(CHAT, json=body | {"stream": True}).text
        wrong = client.post(CHAT, json=body | {"chat_template_kwargs": {"enable_thinking": 1}})
    assert (message["content"], message["reasoning_content"].strip(), wrong.status_code) == ("", expected, 400)
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    thought = "".join(event["choices"][0]["delta"].get("reasoning_content", "") for event in events)
    assert thought.strip() == expected


def test_an_event_is_one_line_for_clients_that_end_lines_as_unicode_does():
    text = "".join(map(chr, range(0x3000)))
    (line,) = event_text({"content": text}).rstrip("\n").splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"content": text}
