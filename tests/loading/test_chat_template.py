"""Chat templates against transformers' own renderer, in the styles of popular models."""

# ruff: noqa: E501

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from offload.errors import PromptError
from offload.loading.tokenizers.chat_template import ChatTemplate
from tests.support.models import TEMPLATE
from tests.support.tool_templates import HERMES, LLAMA, MISTRAL, QWEN

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("
    "'Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == "
    "'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + "
    "role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{'<start_of_turn>model\n'}}{% endif %}"
)
TEMPLATES = {
    "chatml": TEMPLATE,
    "llama 3": LLAMA,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "hermes": HERMES,
    "gemma": GEMMA,
    # What templates may use, one by one.
    "blocks": "  {% if true %}\n  a\n  {% endif %}\n{# note #}\n  {{ messages[0].content }}\n",
    "loop controls": "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% break %}{% else %}{% continue %}"
    "{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "json": "{{ {'text': '<é> & \"x\"', 'n': [1, 2]} | tojson }}{{ messages | tojson(indent=2) }}"
    "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}{{ 'é' | tojson(ensure_ascii=true) }}",
    "dict": "{% set d = dict(a=1) %}{{ d.a }}{{ dict.fromkeys(['x', 'y'], 2) }}",
    "namespace": "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}",
    "time": "{{ strftime_now('%Y') }}",
    "defined": "{{ tools is none }}{{ documents is none }}{{ custom_tools is defined }}{{ pad_token is defined }}",
}
CHATS = [
    [{"role": "user", "content": "Who tells this story?"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "  Who? <b> & 'é' \n{{ x }} 漢 "}],
]
UNSAFE = [
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ dict.__class__ }}{{ dict.mro() }}",
    "{{ raise_exception('no') }}",
    "{% if %}",
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name):
    for chat in CHATS:
        theirs = {"chat_template": TEMPLATES[name], "add_generation_prompt": True, **SPECIAL}
        try:
            expected = render_jinja_template([chat], tools=TOOLS, **theirs)[0][0]
        except TemplateError as error:
            with pytest.raises(PromptError, match=str(error)):
                ChatTemplate(TEMPLATES[name], SPECIAL).render(chat, tools=TOOLS)
        else:
            assert ChatTemplate(TEMPLATES[name], SPECIAL).render(chat, tools=TOOLS) == expected


@pytest.mark.parametrize("source", UNSAFE)
def test_what_is_unsafe_or_wrong_is_refused(source):
    with pytest.raises(PromptError, match=r"refuses this conversation|line 1 of") as caught:
        ChatTemplate(source, SPECIAL).render(CHATS[0])
    assert "--raw" in caught.value.hint and "system" not in caught.value.hint


def test_what_a_template_reads():
    template = ChatTemplate("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", {})
    assert template.takes_parts and template.variables == {"messages"} and template.switch is None
    other = ChatTemplate(TEMPLATE + "{{ 'on' if thinking }}{{ enable_x }}{# enable_thinking #}", {})
    assert not other.takes_parts and other.switch == "thinking"
    assert other.render(CHATS[0], variables={"thinking": True, "bos_token": "", "messages": []}).endswith("on")


def test_of_several_templates_the_default_is_used_and_another_with_tools():
    several = ChatTemplate({"tool_use": "tools", "default": "plain"}, {})
    assert (several.render(CHATS[0]), several.render(CHATS[0], tools=[{}])) == ("plain", "tools")
