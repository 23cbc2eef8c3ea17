"""Templates of Hermes, Qwen, Llama 3 and Mistral: what they write of a call is what answers may be."""

import json
import re

import pytest

from offload.constraints.grammar import compile_grammar
from offload.constraints.matcher import GrammarMatcher
from offload.errors import PromptError
from offload.loading.tokenizers.chat_template import ChatTemplate
from offload.loading.tokenizers.tool_calls import CallReader, Tool, calls_grammar, tool_format
from tests.support.constraints import BYTES, accepts, lltokenizer
from tests.support.tool_templates import QWEN, TEMPLATES

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
    return tool_format(ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"}))


def read(form, text, step=1):
    """Return the text and the calls of an answer that arrives in pieces."""
    reader = CallReader(form)
    content, calls = "", []
    for at in range(0, len(text), step):
        more, found = reader.feed(text[at : at + step])
        content, calls = content + more, calls + found
    return content + reader.flush(), tuple(call.name for call in calls), [json.loads(call.arguments) for call in calls]


def matcher(form, is_required=True, has_several=True):
    grammar = calls_grammar(
        form, [Tool(each["function"]["name"], SCHEMA) for each in TOOLS], is_required, SPECIAL, has_several
    )
    vocabulary = lltokenizer([*BYTES, b"<end>", *map(str.encode, SPECIAL)], eos=256, special=SPECIAL.values())
    return GrammarMatcher(compile_grammar("grammar", grammar, vocabulary))


def ids(text):
    parts = re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text)
    return [token for part in parts for token in ([SPECIAL[part]] if part in SPECIAL else part.encode())]


def test_a_description_that_is_absent_is_empty_where_the_template_needs_one():
    template = ChatTemplate("{% for t in tools %}{{ t.function.name + t.function.description }}{% endfor %}", {})
    assert template.render(ASKED, [{"type": "function", "function": {"name": "f"}}, TOOLS[0]]) == "fweatherd"


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_the_call_that_a_template_writes_is_read(name, step):
    call = written(name)
    assert read(form_of(name), call, step) == ("", ("weather",), [{"place": "Oslo"}])
    awkward = call.replace('"Oslo"', r'"}]\"{"')
    before = "" if form_of(name).is_alone else "Well. "
    assert read(form_of(name), before + awkward, step) == (before, ("weather",), [{"place": '}]"{'}])


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
        assert read(form, text, step) == ("", ("weather", "time"), [{"place": "Oslo"}] * 2)


@pytest.mark.parametrize("name", ["hermes", "qwen", "llama", "magistral"])
def test_several_calls_or_one(name):
    one, form = written(name), form_of(name)
    assert accepts(matcher(form, False), ids(one + one.replace("weather", "time")))
    for text in (one, "Well. " + one, "None.")[form.is_alone :: 1 + form.is_alone]:
        assert accepts(matcher(form, False, False), ids(text))
    assert not accepts(matcher(form, False, False), ids(one + one.replace("weather", "time")))


def test_without_a_mark_only_a_whole_answer_is_a_call():
    """An answer of Llama 3 that has JSON inside is a text."""
    call, form = written("llama"), form_of("llama")
    for text in (f"Well. {call}", f"Write {call} so.", '{"na": 1}', '[{"name": "weather", "parameters": {}}]'):
        assert accepts(matcher(form, False), ids(text))
        assert {read(form, text, step)[:2] for step in (1, 5, 1000)} == {(text, ())}
    for text in (call.replace("weather", "x"), f"{call} so", "\n" + call.replace("weather", "x")):
        assert not accepts(matcher(form, False), ids(text))


def test_a_text_without_calls_is_whole():
    reader = CallReader(form_of("hermes"))
    text = "a <tool_cal and <tool_call>\n<"
    assert reader.feed(text)[0] + reader.flush() == text


@pytest.mark.parametrize("step", [1, 1000])
def test_a_call_that_is_cut_is_no_text(name, step):
    form, call = form_of(name), written(name)
    for end in range(len(form.trigger), call.index("{", len(form.begin))):
        assert read(form, f"{'' if form.is_alone else 'Well. '}{call[:end]}", step)[0] in ("", "Well. ")


OTHERS = {  # what templates write of a call in other ways, and their marks
    "apriel": ("\n<tool_calls>[{N", "}]</tool_calls>", "<tool_calls>"),
    "mistral small 3.2": ("[TOOL_CALLS]NAME[CALL_ID]abcdefghi[ARGS]ARGUMENTS", "", "[CALL_ID]"),
    "minimax": ("]<]minimax[>[<tool_call>\n{N", "}\n</tool_call>", "minimax"),
    "glm": ("\n<tool_call>NAME\n<arg_key>place</arg_key>", "</tool_call>", "<arg_key>"),
    "qwen coder": ("<tool_call>\n<function=NAME>", "</function>\n</tool_call>", "<function="),
    "seed": ("<seed:tool_call>\n<function=NAME>", "</seed:tool_call>", "<seed:tool_call>"),
    "command": ('<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "NAME", ', "}]", "tool_name"),
    "nothing": ("", "", "no calls of tools"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_template_that_writes_calls_in_another_way_is_refused_with_its_mark(other):
    begin, end, mark = OTHERS[other]
    begin = begin.replace("{N", '{"name": "NAME", "arguments": ARGUMENTS')
    call = f"'{begin}{end}'".replace("\n", "\\n").replace("NAME", "' + c.function.name + '")
    call = call.replace("ARGUMENTS", "' + c.function.arguments | tojson + '")
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}{{ CALL }}"
    )
    source = "{% for t in tools or [] %}{{ t.function.parameters.properties | tojson }}{% endfor %}" + source
    source += "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    with pytest.raises(PromptError, match=re.escape(mark)):
        tool_format(ChatTemplate(source.replace("CALL", call), {}))


def test_a_template_that_begins_answers_by_thinking_tells_its_format():
    thinks = QWEN.replace("{%- for tool_call in", "{{- '\\n<think>\\n\\n</think>\\n' }}{%- for tool_call in")
    template = thinks.replace("{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}")
    assert thinks != QWEN and template != thinks and tool_format(ChatTemplate(template, {})) == form_of("qwen")
