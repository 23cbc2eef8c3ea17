"""Templates of Hermes, Qwen, Llama 3 and Mistral: what they write of a call is what answers may be."""

import json
import re

import pytest

from offload.constraints.grammar import compile_grammar
from offload.constraints.matcher import GrammarMatcher
from offload.loading.tokenizers.chat_template import ChatTemplate
from offload.loading.tokenizers.tool_calls import FORMATS, CallReader, Tool, calls_grammar, tool_format
from tests.support.constraints import BYTES, accepts, lltokenizer
from tests.support.tool_templates import TEMPLATES

SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}}
    for name in ("weather", "time")
]
CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "weather", "arguments": {"place": "Oslo"}}}
ASKED = [{"role": "user", "content": "How is it?"}]
CALLED = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
SPECIAL = {mark: 257 + number for number, mark in enumerate(("[TOOL_CALLS]", "[ARGS]"))}
ENDS = {"hermes": "<|im_end|>", "qwen": "<|im_end|>", "llama": "<|eot_id|>"}


@pytest.fixture(params=TEMPLATES)
def name(request):
    return request.param


def rendered(name, messages):
    return ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, tools=TOOLS)


def written(name):
    """Return the call in a prompt with it, as the model would have written it."""
    before, after = rendered(name, ASKED), rendered(name, CALLED)
    assert after.startswith(before)
    return after[len(before) :].partition(ENDS.get(name, "</s>"))[0].lstrip("\n")


def form_of(name):
    return tool_format(ChatTemplate(TEMPLATES[name], {}).text(with_tools=True))


def read(form, text, step=1):
    """Return the text and the calls of an answer that arrives in pieces."""
    reader = CallReader(form)
    content, names, arguments = "", [], {}
    for at in range(0, len(text), step):
        more, pieces = reader.feed(text[at : at + step])
        content += more
        for each in pieces:
            names += [] if each.name is None else [each.name]
            arguments[each.call] = arguments.get(each.call, "") + each.arguments
    return content + reader.flush(), names, [json.loads(each) for each in arguments.values()]


def matcher(form, is_required=True, has_several=True):
    grammar = calls_grammar(
        form, [Tool(each["function"]["name"], SCHEMA) for each in TOOLS], is_required, SPECIAL, has_several
    )
    vocabulary = lltokenizer([*BYTES, b"<end>", *map(str.encode, SPECIAL)], eos=256, special=SPECIAL.values())
    return GrammarMatcher(compile_grammar("grammar", grammar, vocabulary))


def ids(text):
    parts = re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text)
    return [token for part in parts for token in ([SPECIAL[part]] if part in SPECIAL else part.encode())]


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_the_call_that_a_template_writes_is_read(name, step):
    call = written(name)
    assert read(form_of(name), call, step) == ("", ["weather"], [{"place": "Oslo"}])
    awkward = call.replace('"Oslo"', r'"}]\"{"')
    assert read(form_of(name), f"Well. {awkward}", step) == ("Well. ", ["weather"], [{"place": '}]"{'}])


def test_the_call_that_a_template_writes_is_an_answer_and_another_is_not(name):
    assert form_of(name).id_length in ((9,) if name in ("mistral", "nemo", "magistral") else (None,))
    form, text = form_of(name), written(name).replace(f', "id": "{CALL["id"]}"', "")
    assert accepts(matcher(form), ids(text)) and accepts(matcher(form, False), ids(text))
    assert not accepts(matcher(form), ids(text.replace("weather", "whether")))
    assert not accepts(matcher(form), ids(text.replace("place", "plaice")))


@pytest.mark.parametrize("name", ["mistral", "nemo"])
def test_several_calls_are_one_list(name):
    one, form = written(name).replace(f', "id": "{CALL["id"]}"', ""), form_of(name)
    text = one[:-1] + ", " + one[one.index("{") :].replace("weather", "time")
    assert accepts(matcher(form), ids(text)) and not accepts(matcher(form, has_several=False), ids(text))
    for step in (1, 2, 7, 1000):
        assert read(form, text, step) == ("", ["weather", "time"], [{"place": "Oslo"}] * 2)


@pytest.mark.parametrize("name", ["hermes", "qwen", "llama", "magistral"])
def test_several_calls_or_one(name):
    one, form = written(name), form_of(name)
    assert accepts(matcher(form, False), ids(one + one.replace("weather", "time")))
    for text in (one, "Well. " + one, "None."):
        assert accepts(matcher(form, False, False), ids(text))
    assert not accepts(matcher(form, False, False), ids(one + one.replace("weather", "time")))


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
