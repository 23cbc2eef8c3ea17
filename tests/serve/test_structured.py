"""Answers of a given form and calls of tools over HTTP, by the official client and by hand."""

import json
import re
import shutil

import pytest
from pydantic import BaseModel, Field

from tests.support.serving import openai_client, opened_model, serve_options, serving
from triforce_cli.serve.tools import tools_of

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Who?"}], "temperature": 0, "max_tokens": 80}
METHODS = ({}, {"method": "ar"}, {"method": "lookup", "gamma2": 3}, {"method": "retrieval", "budget": 64})
TEMPLATE = """{%- for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>
{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
PARAMETERS = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "count", "parameters": PARAMETERS}}


class Person(BaseModel):
    name: str = Field(max_length=5)
    age: int = Field(ge=0, le=9)


@pytest.fixture(scope="module")
def served(tiny_model_dir, tmp_path_factory):
    """An endpoint of a model whose template has tools."""
    folder = shutil.copytree(tiny_model_dir, tmp_path_factory.mktemp("tools") / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    opened = opened_model(folder)
    with serving(opened, opened.model.load(), serve_options()) as found:
        yield found


@pytest.fixture(scope="module")
def api(served):
    return openai_client(served).chat.completions


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}


def test_an_answer_is_an_instance_of_its_schema_by_every_method(api):
    wanted = {"model": "tiny", "response_format": form(Person.model_json_schema()), **ASKED}
    (text,) = {api.create(extra_body=more, **wanted).choices[0].message.content for more in METHODS}
    assert Person(**json.loads(text)) == api.parse(**wanted | {"response_format": Person}).choices[0].message.parsed


@pytest.mark.parametrize(("more", "begin"), [({}, "{"), ({"schema": {"const": [1, 2]}}, "[1")])
def test_a_json_object_begins_as_one(api, more, begin):
    wanted = {"model": "tiny", "response_format": {"type": "json_object"} | more, **ASKED | {"max_tokens": 2}}
    choice = api.create(**wanted).choices[0]
    assert choice.message.content.startswith(begin) and choice.finish_reason == "length"


def test_a_required_call_whole_and_streamed(api):
    wanted = ASKED | {"model": "tiny", "tools": [TOOL], "tool_choice": "required"}
    choice = api.create(**wanted).choices[0]
    (called,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert called.function.name == "count" and json.loads(called.function.arguments)["n"] in (1, 2)
    deltas = [chunk.choices[0] for chunk in api.create(stream=True, **wanted)]
    assert all(len(delta.delta.tool_calls or []) <= 1 for delta in deltas)
    calls = [each for delta in deltas for each in delta.delta.tool_calls or []]
    assert (calls[0].function.name, calls[0].id[:5], deltas[-1].finish_reason) == ("count", "call_", "tool_calls")
    assert "".join(each.function.arguments for each in calls) == called.function.arguments
    cut = api.create(stop=['"n"'], **wanted).choices[0]  # a part of a call is none
    assert (cut.message.tool_calls, cut.message.content, cut.finish_reason) == (None, "", "stop")


def test_a_call_and_its_result_are_in_the_next_prompt(api):
    call = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": '{"n": 2}'}}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "two"},
    ]
    wanted = {"model": "tiny", "tools": [TOOL], "max_tokens": 3}
    found, short = (api.create(messages=each, **wanted) for each in (messages, ASKED["messages"]))
    assert found.usage.prompt_tokens - short.usage.prompt_tokens > len('{"name": "count", "arguments": {"n": 2}')


@pytest.mark.parametrize("arguments", ['{"s": "<|im_end|>"}', '{"s": "cut', {"s": 1}, "", None, '"\\ud800"'])
@pytest.mark.parametrize(
    "function",
    [
        {},
        {"parameters": None},
        {"parameters": {}, "description": None},
        {"parameters": {"type": None, "properties": None, "required": None}},
    ],
)
def test_a_conversation_goes_on_whatever_a_call_had(served, arguments, function):
    """Control tokens in it are text, and tools may be without parameters."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    said.append({"role": "tool", "tool_call_id": "c1", "content": "<tool_call>"})
    response = served.client.post(CHAT, json=tool(name="f", **function) | {"messages": said, "max_tokens": 1})
    assert response.status_code == 200, response.text


def test_arguments_have_no_further_keys():
    wanted = tools_of({"tools": [TOOL]})
    assert wanted.tools[0].parameters["additionalProperties"] is False


def tool(**function):
    return {"tools": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"response_format": {"type": "xml"}}, "'xml' is not supported"),
        ({"response_format": {"type": "json_schema"}}, "has no schema"),
        ({"response_format": form({"properties": {"a": {"type": "txt"}}})}, "at /properties/a: Invalid type"),
        ({"tools": [{}]}, 'tools[0] has not the type "function"'),
        (tool(name="f", parameters={"not": {}}), "tools: "),
        (tool(name="f", parameters={"type": "integer"}), "parameters of f are no schema of an object"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "none of the tools"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice is 'maybe'"),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls is neither true nor false"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "cannot be used with tools"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "no tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
            "tool call of messages",
        ),
    ],
)
def test_wrong_forms_and_tools_are_refused_with_their_place(served, more, words):
    response = served.client.post(CHAT, json=ASKED | more)
    assert response.status_code == 400 and words in response.json()["error"]["message"], response.text


def test_tools_that_are_not_to_be_called_are_as_none(served):
    plain, none = (
        served.client.post(CHAT, json=ASKED | more).json() for more in ({}, {"tools": [TOOL], "tool_choice": "none"})
    )
    assert none["choices"] == plain["choices"]
    (choice,) = served.client.post(CHAT, json=ASKED | tool(name="no-arguments") | {"tool_choice": "required"}).json()[
        "choices"
    ]
    assert re.fullmatch(r"\{.*", choice["message"]["tool_calls"][0]["function"]["arguments"])
