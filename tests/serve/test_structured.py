"""Answers of a given form over HTTP, by the official client and by hand, and speculation by request."""

import json
import re
import shutil
import threading

import pytest
from pydantic import BaseModel, Field

from offload.constraints import vocabulary
from tests.support.serving import connected, openai_client, opened_model, serve_options, serving

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Who?"}], "temperature": 0, "max_tokens": 80}


class Person(BaseModel):
    name: str = Field(max_length=5)
    age: int = Field(ge=0, le=9)


SHORT = Person.model_json_schema()


@pytest.fixture(scope="module")
def served(tiny_model_dir):
    opened = opened_model(tiny_model_dir)
    with serving(opened, opened.model.load(), serve_options()) as found:
        yield found


@pytest.fixture(scope="module")
def client(served):
    with connected(served) as found:
        yield found


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}


def content(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_an_answer_is_an_instance_of_its_schema_by_every_method(client):
    texts = {content(client.post(CHAT, json=ASKED | {"response_format": form(SHORT)} | more)) for more in METHODS}
    (text,) = texts
    assert Person(**json.loads(text))


METHODS = (
    {},
    {"method": "ar"},
    {"method": "lookup", "gamma2": 3},
    {"method": "retrieval", "budget": 64, "draft": "none"},
)


def test_a_json_object_begins_as_one(client):
    response = client.post(CHAT, json=ASKED | {"response_format": {"type": "json_object"}, "max_tokens": 2})
    assert content(response).startswith("{") and response.json()["choices"][0]["finish_reason"] == "length"


def test_the_official_client_s_parse(served):
    api = openai_client(served)
    found = api.chat.completions.parse(model=api.models.list().data[0].id, response_format=Person, **ASKED)
    assert isinstance(found.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"response_format": {"type": "xml"}}, "'xml' is not supported"),
        ({"response_format": {"type": "json_schema"}}, "has no schema"),
        ({"response_format": form(SHORT) | {"x": 1}}, "unknown 'x'"),
        ({"response_format": form({"properties": {"a": {"type": "txt"}}})}, "at /properties/a: Invalid type"),
        ({"response_format": form({"properties": {"a": {"type": "txt"}}})}, "; docs/structured.md says what is"),
        ({"response_format": form({"items": {"oneOf": [{"type": "string"}, {}]}})}, "at /items: alternatives of oneOf"),
        ({"response_format": form({"items": {"oneOf": [{"type": "string"}, {}]}})}, "; use anyOf"),
        ({"method": "none"}, "method is 'none'"),
        ({"method": "naive"}, "needs a draft model"),
    ],
)
def test_wrong_forms_and_methods_are_refused_with_their_place(client, more, words):
    response = client.post(CHAT, json=ASKED | more)
    assert response.status_code == 400 and words in response.json()["error"]["message"]


TEMPLATE = """{%- for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>
{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
PARAMETERS = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "count", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def caller(tiny_model_dir, tmp_path_factory):
    """A client of a model whose template has tools."""
    folder = shutil.copytree(tiny_model_dir, tmp_path_factory.mktemp("tools") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    opened = opened_model(folder)
    with serving(opened, opened.model.load(), serve_options()) as found:
        yield openai_client(found)


def test_a_required_call_whole_and_streamed(caller):
    wanted = ASKED | {"model": caller.models.list().data[0].id, "tools": [TOOL], "tool_choice": "required"}
    choice = caller.chat.completions.create(**wanted).choices[0]
    (called,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert called.function.name == "count" and json.loads(called.function.arguments)["n"] in (1, 2)
    deltas = [chunk.choices[0] for chunk in caller.chat.completions.create(stream=True, **wanted)]
    calls = [each for delta in deltas for each in delta.delta.tool_calls or []]
    assert (calls[0].function.name, calls[0].id[:5], deltas[-1].finish_reason) == ("count", "call_", "tool_calls")
    assert "".join(each.function.arguments for each in calls) == called.function.arguments
    cut = caller.chat.completions.create(stop=['"n"'], **wanted).choices[0]
    assert (cut.message.tool_calls[0].function.arguments, cut.finish_reason) == ("{", "stop")
    *_, last = caller.chat.completions.create(stop=['"n"'], stream=True, **wanted)
    assert last.choices[0].finish_reason == "stop"


def test_the_engine_s_thread_which_all_wait_for_compiles_nothing(caller, monkeypatch):
    threads, compile_ = [], vocabulary.compile_grammar

    def recorded(*args):
        threads.append(threading.current_thread().name)
        return compile_(*args)

    monkeypatch.setattr(vocabulary, "compile_grammar", recorded)
    tools = [{"type": "function", "function": {"name": "another", "parameters": PARAMETERS | {"title": "new"}}}]
    caller.chat.completions.create(model=caller.models.list().data[0].id, tools=tools, **ASKED | {"max_tokens": 1})
    assert threads == ["encoding", "encoding"]


def test_a_call_and_its_result_are_in_the_next_prompt(caller):
    model = caller.models.list().data[0].id
    call = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": '{"n": 2}'}}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "two"},
    ]
    found = caller.chat.completions.create(model=model, messages=messages, tools=[TOOL], max_tokens=3, temperature=0)
    short = caller.chat.completions.create(model=model, tools=[TOOL], **ASKED | {"max_tokens": 3})
    assert found.usage.prompt_tokens - short.usage.prompt_tokens > len('{"name": "count", "arguments": {"n": 2}}')


def called(arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": arguments}}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}, *ASKED["messages"]]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tools": [{}]}, 'tools[0] is no object with the type "function"'),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function has no parameters"),
        (
            {"tools": [TOOL | {"function": {"name": "f", "parameters": {"not": {}}}}]},
            "parameters of f: the JSON schema has a keyword that is not supported, at its top: not; remove it",
        ),
        (
            {"tools": [TOOL | {"function": {"name": "f", "parameters": {"type": "integer"}}}]},
            "parameters of f have the type 'integer'",
        ),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "none of the tools"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice is 'maybe'"),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls is neither true nor false"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "cannot be used with tools"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "no tool_call_id"),
        ({"messages": called('{"n": "\\ud800"}')}, "messages[0] has half a surrogate pair"),
        ({"messages": called("[" * 10_000)}, "the request is nested too deeply"),
    ],
)
def test_wrong_tools_are_refused_with_their_place(caller, more, words):
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match=re.escape(words)):
        caller.chat.completions.create(**{"model": caller.models.list().data[0].id, **ASKED, **more})


def test_a_template_without_tools_is_refused(client):
    response = client.post(CHAT, json=ASKED | {"tools": [TOOL]})
    assert response.status_code == 400 and "template has no tools" in response.json()["error"]["message"]
