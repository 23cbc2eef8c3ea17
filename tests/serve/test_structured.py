"""Answers of a given form over HTTP, by the official client and by hand, and speculation by request."""

import json

import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.support.serving import connected, opened_model, serve_options, serving

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
    api = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

    found = api.chat.completions.parse(model=api.models.list().data[0].id, response_format=Person, **ASKED)
    assert isinstance(found.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"response_format": {"type": "xml"}}, "'xml' is not supported"),
        ({"response_format": {"type": "json_schema"}}, "has no schema"),
        ({"response_format": form(SHORT) | {"x": 1}}, "unknown 'x'"),
        ({"response_format": form({"properties": {"a": {"type": "txt"}}})}, "at /properties/a: Invalid type"),
        ({"method": "none"}, "method is 'none'"),
        ({"draft": "self"}, "draft is 'self'"),
        ({"method": "naive"}, "needs a draft model"),
    ],
)
def test_wrong_forms_and_methods_are_refused_with_their_place(client, more, words):
    response = client.post(CHAT, json=ASKED | more)
    assert response.status_code == 400 and words in response.json()["error"]["message"]
