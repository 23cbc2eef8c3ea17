"""Chat templates with tools, after the formats that models document: small, with what is particular about each."""

HERMES = """{{ bos_token }}<|im_start|>system
You may call these tools:
<tools>{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}</tools>
Return <tool_call>
{"name": <function-name>, "arguments": <args-dict>}
</tool_call><|im_end|>
{% for message in messages %}{% if message.role == "tool" %}<|im_start|>tool
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.tool_calls %}<|im_start|>assistant
{% for call in message.tool_calls %}{% set call = call.function %}<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{% if not loop.last %}

{% endif %}{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}<|im_start|>assistant
"""
QWEN = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}
{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nReturn <tool_call></tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
  {%- if message.role == "user" or message.role == "assistant" and not message.tool_calls %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
  {%- elif message.role == "assistant" %}
    {{- '<|im_start|>' + message.role }}{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
    {%- for tool_call in message.tool_calls %}
      {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
      {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
      {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif message.role == "tool" %}
    {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
  {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
"""
LLAMA = """{{- bos_token }}{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set first = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{{- "<|start_header_id|>user<|end_header_id|>\\n\\n" }}{%- if tools is not none %}
  {{- 'Respond with {"name": function name, "parameters": dictionary of argument name and its value}.\\n\\n' }}
  {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}{{- first + "<|eot_id|>" }}
{%- for message in messages %}
  {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
  {%- elif 'tool_calls' in message %}
    {%- if not message.tool_calls|length == 1 %}
      {{- raise_exception("This model only supports single tool-calls at once!") }}
    {%- endif %}
    {%- set tool_call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{{- '{"name": "' + tool_call.name + '", ' }}
    {{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|eot_id|>" }}
  {%- else %}
    {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}{{- message.content | tojson }}{{- "<|eot_id|>" }}
  {%- endif %}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
"""
_MISTRAL = """{{- bos_token }}{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{%- for message in messages %}
  {%- if message["role"] == "user" %}
    {%- if tools is not none and (message == user_messages[-1]) %}
      {{- "[AVAILABLE_TOOLS] [" }}{%- for tool in tools %}{{- tool | tojson }}
      {{- ", " if not loop.last else "]" }}{%- endfor %}{{- "[/AVAILABLE_TOOLS]" }}
    {%- endif %}
    {{- "[INST] " + message["content"] + "[/INST]" }}
  {%- elif message.tool_calls is defined and message.tool_calls is not none %}
    {{- "[TOOL_CALLS]GAP[" }}
    {%- for tool_call in message.tool_calls %}
      {%- set out = tool_call.function | tojson %}{{- out[:-1] }}
      {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
        {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
      {%- endif %}
      {{- ', "id": "' + tool_call.id + '"}' }}{{- ", " if not loop.last else "]" + eos_token }}
    {%- endfor %}
  {%- elif message["role"] == "assistant" %}{{- " " + message["content"] + eos_token }}
  {%- elif message["role"] == "tool" %}
    {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {{- "[/TOOL_RESULTS]" }}
  {%- endif %}
{%- endfor %}
"""
MISTRAL, NEMO = _MISTRAL.replace("GAP", " "), _MISTRAL.replace("GAP", "")
MAGISTRAL = """{{- bos_token }}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]
{%- for message in messages %}
  {%- if message["role"] == "user" %}{{- "[INST]" + message["content"] + "[/INST]" }}
  {%- elif message["role"] == "tool" %}{{- "[TOOL_RESULTS]" + message["content"] + "[/TOOL_RESULTS]" }}
  {%- else %}{{- message["content"] }}
    {%- for call in message.tool_calls or [] %}
      {{- "[TOOL_CALLS]" + call.function.name + "[ARGS]" + call.function.arguments | tojson }}
    {%- endfor %}{{- eos_token }}
  {%- endif %}
{%- endfor %}
"""
NOUS = {"default": "{% for message in messages %}{{ message.content }}{% endfor %}", "tool_use": HERMES}
TEMPLATES = {"hermes": NOUS, "qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "nemo": NEMO, "magistral": MAGISTRAL}
