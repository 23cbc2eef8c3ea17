"""The endpoint as clients see it: openai's own, and raw requests."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from offload import GenerationConfig, Sampling
from offload.loading.tokenizers.chat_template import ChatMessage
from tests.support.engine import tokens
from tests.support.models import TEMPLATE
from tests.support.serving import hang_up, opened_model, serve_options, serving
from triforce_cli.serve.answer import event_text
from triforce_cli.serve.app import create_app
from triforce_cli.serve.request import parse_request
from triforce_cli.serve.sequences import ServedModel
from triforce_cli.serve.server_metrics import ServerMetrics

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXTS = [f"Once upon a time, in the {place} of the king," for place in ("house", "garden", "tower", "stable", "well")]
ASKED = {"messages": [{"role": "user", "content": "a"}]}


def answer(opened, loaded, ids, count=24):
    """Return the engine's own greedy text."""
    events = loaded.generate(ids, Sampling(temperature=0), GenerationConfig(max_new_tokens=count))
    return opened.model.tokenizer.decode(tokens(events))


def metric(client, name):
    return sum(float(line.split()[-1]) for line in client.get("/metrics").text.splitlines() if line.startswith(name))


def events(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


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
        options = {"prompt": text, "temperature": 0, "max_tokens": 24, "stream_options": {"include_usage": True}}
        *chunks, last = list(api.completions.create(model="tiny", stream=True, **options))
        assert last.usage.completion_tokens == 24 and not last.choices
        assert chunks[-1].choices[0].finish_reason == "length" and {chunk.usage for chunk in chunks} == {None}
        return "".join(chunk.choices[0].text for chunk in chunks)

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
    options = {"messages": messages, "temperature": 0, "max_completion_tokens": 9}
    stream = list(api.chat.completions.create(model="tiny", stream=True, **options))
    assert stream[0].choices[0].delta.role == "assistant" and "usage" not in stream[0].model_fields_set
    roles = {"developer": "system"}
    texts = [each["content"] if isinstance(each["content"], str) else "Who is it?" for each in messages]
    said = [
        ChatMessage(roles.get(each["role"], each["role"]), text) for each, text in zip(messages, texts, strict=True)
    ]
    ids = opened.model.tokenizer.chat_turns(said)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer(opened, loaded, ids, 9)


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
    body = {"prompt": TEXTS[0], "max_tokens": 24, "temperature": 0, "stop": stop}
    (stopped,) = client.post(COMPLETIONS, json=body).json()["choices"]
    assert (stopped["text"], stopped["finish_reason"]) == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        ({"prompt": "a", "echo": True}, "echo is not supported", "echo"),
        ({"prompt": "a", "tempratur": 1}, "did you mean temperature?", "tempratur"),
        ({"prompt": "a", "zzz": 1}, "--ignore-unknown", "zzz"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1", "temperature"),
        ({"prompt": "a", "max_tokens": True}, "give a whole number", "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0; use a whole number", "max_tokens"),
        ({"prompt": "a", "max_tokens": 600}, "maximum context length is 512 tokens; the prompt has", "max_tokens"),
        ({"prompt": [1] * 512}, "this model's maximum context length is 512 tokens", "prompt"),
        ({"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}, "both given", "max_completion_tokens"),
        ({"prompt": "a", "n": 17}, "1 to 16 are possible", "n"),
        ({"prompt": "a", "n": 12}, "11 are taken at a time", "n"),
        ({"prompt": "a", "stop": [1]}, "stop", "stop"),
        ({"prompt": "a", "logprobs": 6}, "0 to 5 are possible", "logprobs"),
        ({"prompt": "a", "draft": "self"}, "draft is 'self'", "draft"),
        ({"prompt": "a", "method": "naive"}, "needs a draft model", None),
        ({"prompt": [1, 267]}, "token id 267 at position 1", "prompt"),
        ({"prompt": ""}, "the prompt is empty", "prompt"),
        ({"prompt": "a", "n_probs": 2}, "did you mean logprobs?", "n_probs"),
        (ASKED | {"chat_template_kwargs": {"x": 1}}, "no variable 'x'", "chat_template_kwargs"),
        ({}, "prompt is neither text", "prompt"),
        (b'{"prompt": "\\ud800"}', "surrogates not allowed", None),
        (b"[" * 100_00, "not valid JSON", None),
        (b'{"prompt": "a", "top_p": NaN}', "NaN", None),
        (b'\xef\xbb\xbf{"prompt": "a", "temperature": 1e400}', "Out of range float", None),
        ({"prompt": "a", "stream_options": {"include_use": True}}, "unknown 'include_use'", "stream_options"),
        ({"messages": []}, "messages is not a list", "messages"),
        ({"messages": [{"role": [], "content": "a"}]}, "messages[0]", "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "list of text parts", "messages[0]"),
        (ASKED | {"top_logprobs": 2}, "needs logprobs", "top_logprobs"),
        (ASKED | {"response_format": {"type": "json_object"}}, "no end-of-sequence token", "response_format"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused(client, body, words, param):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    path = CHAT if b'"messages"' in content else COMPLETIONS
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400 and words in error["message"] and error["param"] == param
    assert sorted(error) == ["code", "message", "param", "type"]


def test_unknown_fields_are_passed_over_on_request(opened, loaded):
    body = {"prompt": "a", "max_tokens": 1, "logit_bais": {}}
    with serving(opened, loaded, serve_options(ignore_unknown=True)) as served:
        assert served.client.post(COMPLETIONS, json=body).status_code == 200
        assert served.client.post(COMPLETIONS, json=body | {"echo": True}).status_code == 400


def test_models_and_other_paths(client, api):
    from openai import NotFoundError

    assert [model.id for model in api.models.list()] == ["tiny"] and api.models.retrieve("tiny").id == "tiny"
    with pytest.raises(NotFoundError):
        api.completions.create(model="gpt", prompt="a")
    for response in (client.get("/v1/nothing"), client.get(CHAT)):
        assert response.status_code in (404, 405) and "message" in response.json()["error"]
    assert [client.get(path).json()["status"] for path in ("/health", "/ready")] == ["ok", "ready"]


def test_paths_of_other_interfaces(client):
    assert client.get("/models").json() == client.get("/v1/models").json()
    assert client.get("/v1/health").json() == {"status": "ok"}
    assert client.post("/chat/completions", json=ASKED | {"max_tokens": 1}).json()["object"] == "chat.completion"
    for path in ("/api/generate", "/api/chat", "/v1/responses", "/v1/messages", "/v1/embeddings", "/embeddings"):
        response = client.post(path, json={})
        assert response.status_code == 404 and "not there; " in response.json()["error"]["message"]


def test_what_other_servers_take_is_no_error(client):
    """-1 for off, null for a field that is not given, fields of a thinking model's earlier answer."""
    off = {"top_k": -1, "max_tokens": -1, "seed": -1, "temperature": None, "stop": None, "reasoning_effort": "none"}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "reasoning_content": "b", "tool_calls": None},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
            "name": "x",
        },
    ]
    response = client.post(CHAT, json={"messages": messages} | off)
    assert response.status_code == 200 and response.json()["usage"]["total_tokens"] == 512


@pytest.mark.parametrize(("role", "keeps"), [("user", True), ("system", False), ("tool", False)])
def test_parts_are_one_text_for_templates_that_would_write_them_as_a_list(role, keeps):
    message = {"role": role, "tool_call_id": "c", "content": [{"type": "text", "text": "a"}] * 2}
    (found,) = parse_request(json.dumps({"messages": [message]}).encode(), True).messages
    assert found.content == "aa" and ("content" in found.more) is keeps


def test_fields_of_messages_and_variables_are_given_to_the_template(endless, tmp_path):
    shutil.copytree(endless, folder := tmp_path / "reads")
    parts = "{% for p in m.content %}{{ p.text or p.thinking }}{% endfor %}"
    source = (
        f"{{% for m in messages %}}{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{parts}{{% endif %}}"
    )
    source += "{{ m.reasoning_content }}{% endfor %}{{ reasoning_effort }}{{ budget }}"
    (folder / "chat_template.jinja").write_text(source)
    model, said = ServedModel(opened_model(folder), 512), [{"role": "user", "content": "a", "name": "n"}]
    said.append({"role": "assistant", "content": [{"type": "thinking", "thinking": "b"}], "reasoning_content": "c"})
    body = {"messages": said, "reasoning_effort": "low", "chat_template_kwargs": {"budget": 7}}
    (settings,) = model.sequences(parse_request(json.dumps(body).encode(), True))
    assert model.tokenizer.decode(settings.ids) == "abclow7"


def test_a_line_for_each_request_and_one_at_the_end(served, opened):
    said, metrics = [], ServerMetrics()
    model = ServedModel(opened, 512)
    app = create_app(model, served.engine, metrics, serve_options(), served.reported.append, said.append)
    with TestClient(app, "http://127.0.0.1:8000") as client:
        client.post(COMPLETIONS, json={"prompt": TEXTS[0], "max_tokens": 3})
        client.post(COMPLETIONS, json={"prompt": TEXTS[0], "max_tokens": 3, "stream": True})
        client.get("/health"), client.get("/nothing%1b[0m")
    line = (
        r"POST /v1/completions 200 · \d+ tokens read \(\d+ cached\), 3 written, the first after [\d.]+ m?s · [\d.]+ m?s"
    )
    assert len(said) == 3 and all(re.fullmatch(line, each) for each in said[:2]), said
    assert said[2].startswith("GET '/nothing\\x1b[0m' 404") and metrics.total() == "ended after 0 answers of 0 tokens"


def test_a_request_that_is_too_large_or_no_json_is_refused(client):
    assert client.post(COMPLETIONS, json={"prompt": "a" * 21_000}).status_code == 413
    pieces = (b" " * 1000 for _ in range(30))  # without a Content-Length
    assert client.post(COMPLETIONS, content=pieces, headers={"content-type": "application/json"}).status_code == 413
    assert client.post(COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_ends_its_sequence(served, client, stream):
    before = metric(client, 'triforce_sequences_total{reason="cancelled"')
    hang_up(served.app, COMPLETIONS, {"prompt": TEXTS[0], "max_tokens": 400, "stream": stream})
    assert client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200
    assert metric(client, 'triforce_sequences_total{reason="cancelled"') == before + 1


def test_an_error_of_the_server_is_reported_and_kept_from_the_client(client, served, loaded, monkeypatch):
    def broken(*args):
        raise LookupError("a secret of the server")

    served.reported.clear()
    with monkeypatch.context() as patches:
        patches.setattr(ServerMetrics, "text", broken)
        assert client.get("/metrics").json()["error"]["message"].startswith("an internal error")
    body = {"prompt": TEXTS[0], "max_tokens": 4}
    with monkeypatch.context() as patches:
        patches.setattr(loaded.model, "embed", broken)
        whole, streamed = client.post(COMPLETIONS, json=body), client.post(COMPLETIONS, json=body | {"stream": True})
    assert whole.status_code == 500 and "secret" not in whole.text + streamed.text
    assert events(streamed.text)[-1]["error"]["type"] == "server_error"
    assert len(served.reported) == 3
    assert client.post(COMPLETIONS, json=body).status_code == 200  # the server goes on


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
    with serving(opened, loaded, serve_options()) as served:
        more = {"chat_template_kwargs": {"enable_thinking": True}}
        message = served.client.post(CHAT, json=body | more).json()["choices"][0]["message"]
        chunks = events(served.client.post(CHAT, json=body | {"stream": True}).text)
    assert (message["content"], message["reasoning_content"].strip()) == ("", expected)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas).strip() == expected


def test_an_event_is_one_line_for_clients_that_end_lines_as_unicode_does():
    text = "".join(map(chr, range(0x3000)))
    (line,) = event_text(content=text).rstrip("\n").splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"content": text}
