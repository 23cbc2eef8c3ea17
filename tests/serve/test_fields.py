"""Names of a request's fields: those of other programs, unknown ones, and how errors name them."""

import json

import pytest

from triforce_cli.serve.api_errors import ApiError
from triforce_cli.serve.api_request import parse_chat, parse_completion


def body(**fields):
    return json.dumps({"prompt": "a"} | fields).encode()


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"max_completion_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_new_tokens": 5}, {"max_new_tokens": 5}),
    ],
)
def test_names_of_equal_meaning_are_accepted(given, options):
    assert parse_completion(body(**given)).options == options


@pytest.mark.parametrize(
    ("given", "words", "param"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; ask for at least 1", "max_tokens"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram is -1", "no_repeat_ngram"),
        ({"stop": ""}, "give stop some text", "stop"),
        ({"zzz": 1}, "unknown field 'zzz'; known are budget, draft, dry_allowed_length, ", "zzz"),
    ],
)
def test_errors_name_fields_and_not_options(given, words, param):
    with pytest.raises(ApiError) as caught:
        parse_completion(body(**given))
    assert words in caught.value.message and caught.value.param == param
    assert caught.value.status == 400


def test_unknown_fields_are_passed_over_on_request():
    fields = {"reasoning_effort": "low", "temperature": 0}
    chat = json.dumps({"messages": [{"role": "user", "content": "a"}]} | fields).encode()
    assert parse_chat(chat, ignore_unknown=True).options == {"temperature": 0}
    for unsupported in ({"tools": [1]}, {"temperature": -1}):
        with pytest.raises(ApiError):
            parse_completion(body(zzz=1, **unsupported), ignore_unknown=True)


FUNCTION = {"name": "f", "parameters": {}}
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"tools": [{"type": "function", "function": FUNCTION | {"description": "\ud800"}}]}, "tools[0]"),
        ({"messages": [USER, {"role": "tool", "content": "a", "tool_call_id": "\udfff"}]}, "messages[1]"),
    ],
)
def test_halves_of_surrogate_pairs_are_refused_where_templates_would_write_them(given, where):
    with pytest.raises(ApiError, match="half a surrogate pair") as caught:
        parse_chat(json.dumps({"messages": [USER]} | given).encode())
    assert (caught.value.status, caught.value.param) == (400, where)
