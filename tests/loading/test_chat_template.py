"""Chat templates against transformers' own renderer, in the styles of popular models."""

# ruff: noqa: E501

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from offload.errors import PromptError
from offload.loading.tokenizers.chat_template import ChatTemplate
from tests.support.models import TEMPLATE

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# Shortened, with the constructs of the originals.
LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}
"""
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
    "llama 3": LLAMA3,
    "qwen 3": QWEN3,
    "mistral": MISTRAL,
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
            expected = render_jinja_template([chat], **theirs)[0][0]
        except TemplateError as error:
            with pytest.raises(PromptError, match=str(error)):
                ChatTemplate(TEMPLATES[name], SPECIAL).render(chat)
        else:
            assert ChatTemplate(TEMPLATES[name], SPECIAL).render(chat) == expected


@pytest.mark.parametrize("source", UNSAFE)
def test_what_is_unsafe_or_wrong_is_refused(source):
    with pytest.raises(PromptError, match="refuses this conversation"):
        ChatTemplate(source, SPECIAL).render(CHATS[0])


def test_of_several_templates_the_default_is_used_and_another_with_tools():
    several = ChatTemplate({"tool_use": "tools", "default": "plain"}, {})
    assert (several.render(CHATS[0]), several.render(CHATS[0], tools=[{}])) == ("plain", "tools")
