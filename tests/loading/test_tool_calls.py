"""Calls of tools as templates write them: grammars that allow them and nothing else, and readers of streamed texts."""

import json

import pytest

from offload.constraints.grammar import compile_grammar
from offload.constraints.matcher import GrammarMatcher
from offload.loading.tokenizers.tool_calls import FORMATS, CallReader, Tool, calls_grammar, tool_format
from tests.support.constraints import BYTES, accepts, lltokenizer

TOOLS = [
    Tool("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    Tool("stop", {"type": "object", "properties": {}}),
]
IDS = ["mistral-new", "mistral", "nemo", "mistral-other", "hermes", "llama"]


def matcher(form, is_required):
    grammar = calls_grammar(form, TOOLS, is_required, {})
    return GrammarMatcher(compile_grammar("grammar", grammar, lltokenizer([*BYTES, b"<end>"])))


def call(form, name, arguments):
    return f"{form.begin}{name}{form.middle}{arguments}{form.end}"


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_what_an_answer_may_be(form):
    good, other = call(form, "add", '{"a": 3}'), call(form, "sub", '{"a": 3}')
    wrong = call(form, "add", '{"a": "3"}')
    for is_required in (True, False):
        assert accepts(matcher(form, is_required), good.encode())
        assert not accepts(matcher(form, is_required), other.encode())
        assert not accepts(matcher(form, is_required), wrong.encode())
    assert accepts(matcher(form, False), b"No tool is needed.")
    assert not accepts(matcher(form, True), b"No tool is needed.")


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_text_and_its_calls_however_they_arrive(form, step):
    arguments = ['{"a": 3, "b": "}]\\"{"}', "{}"]
    text = "I add. " + call(form, "add", arguments[0]) + "\n" + call(form, "stop", arguments[1])
    reader, content, names, found = CallReader(form), "", [], ["", ""]
    for at in range(0, len(text), step):
        more, pieces = reader.feed(text[at : at + step])
        content += more
        for piece in pieces:
            names += [] if piece.name is None else [piece.name]
            found[piece.call] += piece.arguments
    assert (content + reader.flush()).strip() == "I add." and names == ["add", "stop"] and found == arguments
    assert json.loads(found[0])["b"] == '}]"{'


def test_a_text_without_calls_is_whole():
    reader = CallReader(FORMATS[4])
    text = "a <tool_cal and <tool_call>\n<"
    assert reader.feed(text)[0] + reader.flush() == text


def test_templates_tell_their_format():
    assert tool_format("{{ tools }} <tool_call>") is FORMATS[4]
    assert tool_format("{{ tools }} [TOOL_CALLS] [ARGS]") is FORMATS[0]
    assert tool_format("{{ tools }} ipython {'\"parameters\": '}") is FORMATS[5]
    assert tool_format("{{ tools }} <tool_call>{{ name }}<arg_key>") is None  # GLM 4.5
    assert tool_format("{{ tools }} {'\"parameters\": '}") is None
    assert tool_format("<tool_call>") is None and tool_format("{{ tools }} <tool_call><function=x>") is None
