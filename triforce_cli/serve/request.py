"""Requests of the OpenAI API: JSON -> what is to be generated. What is not supported is refused, never left out.

Knows nothing of a model. Fields that change the answer and that no code reads are errors; those that do not, such as
`user`, are ignored.
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from offload.errors import SettingsError
from offload.loading.tokenizers.chat_template import ASSISTANT, SYSTEM, USER, ChatMessage
from offload.settings.config import check_part
from offload.settings.constraint import JSON_SCHEMA, Constraint
from offload.short_repr import short_json

from ..input.json_fields import FLAG, INTEGER, NUMBER, OBJECT, TEXT, FieldType, has_type, parse_object
from .errors import ApiError
from .tools import ToolRequest, message_fields, tools_of

MOST_SEQUENCES = 16  # of one request
MOST_STOPS = 16
_MOST_LOGPROBS = {"top_logprobs": 20, "logprobs": 5}  # of the likeliest tokens, in a chat and in a completion

# The settings that a request may have, by the names that they have in the API and here; `max_tokens` is another one's.
_SETTINGS: dict[str, FieldType] = {
    **dict.fromkeys(("temperature", "top_p", "frequency_penalty", "presence_penalty"), NUMBER),
    **dict.fromkeys(("min_p", "repetition_penalty", "dry_multiplier", "dry_base"), NUMBER),
    **dict.fromkeys(("seed", "top_k", "dry_allowed_length", "dry_range", "no_repeat_ngram", "max_tokens"), INTEGER),
    **dict.fromkeys(("method", "draft", "tree"), TEXT),
    **dict.fromkeys(("budget", "gamma1", "gamma2"), INTEGER),
}
_OFF = ("top_k", "max_tokens", "seed")  # of -1, as in other servers
# Names of other servers, and what stands for them here.
_ELSEWHERE = {
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), "max_tokens"),
    **dict.fromkeys(("n_probs", "prompt_logprobs"), "logprobs"),
    **dict.fromkeys(("repeat_penalty",), "repetition_penalty"),
    **dict.fromkeys(("stop_sequences", "stop_token_ids"), "stop"),
    **dict.fromkeys(("grammar", "json_schema", "format", "guided_json", "guided_regex"), "response_format"),
    **dict.fromkeys(("guided_choice", "guided_grammar", "structured_outputs"), "response_format"),
    **dict.fromkeys(("num_ctx", "n_ctx"), "triforce serve --context"),
    **dict.fromkeys(("think", "thinking"), "chat_template_kwargs"),
}
_DRAFTS = ("lookup", "none")  # others need memory that was not planned
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier"}
_IGNORED |= {"prompt_cache_key", "prompt_cache_retention"}
_COMMON = {"model", "n", "stop", "stream", "stream_options", "response_format", "logprobs"} | _SETTINGS.keys()
_CHAT = _COMMON | {"messages", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs"}
_CHAT |= {"chat_template_kwargs", "reasoning_effort"}
_COMPLETION = _COMMON | {"prompt"}
# Fields of functions that are not there, and the values that ask for nothing.
_NOTHING: dict[str, Any] = {"logit_bias": {}, "echo": False, "suffix": "", "best_of": 1, "modalities": ["text"]}
_NOTHING |= {"functions": [], "function_call": "none", "tools": [], "tool_choice": "none"}
_FORM = "response_format"
_ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": "tool"}

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A request: `messages` of a chat, or `prompts` to continue, each answered `choices` times.

    Args:
        model: the name that it asks for; None for whatever runs.
        options: settings by name, as `Settings.values`.
        stream, usage: whether to stream, and with the tokens' number at the end; `counts_always`: in each chunk.
        think: whether a reasoning model is to think; None where the request does not say.
        variables: of the chat template.
        effort: how much a reasoning model is to think, for templates that know it.
        logprobs: how many of the likeliest tokens' log-probabilities each token has beside its own; None for none.
        tools: that the answer may call; None for none.
    """

    model: str | None
    options: Mapping[str, Any]
    choices: int
    stream: bool
    usage: bool
    counts_always: bool
    messages: Sequence[ChatMessage] | None = None
    prompts: Sequence[Prompt] = ()
    think: bool | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None
    logprobs: int | None = None
    tools: ToolRequest | None = None

    @property
    def prompt_field(self) -> str:
        """The name of the field that has the prompts."""
        return "prompt" if self.messages is None else "messages"

    @property
    def sequences(self) -> int:
        """The number of answers."""
        return self.choices * (1 if self.messages is not None else len(self.prompts))


def parse_request(data: bytes, is_chat: bool, ignore_unknown: bool = False) -> ApiRequest:
    """Return the request of a body, perhaps without the fields that nobody knows. Raises ApiError."""
    try:
        given = {name: value for name, value in parse_object(data).items() if value is not None}
    except ValueError as error:
        raise ApiError(400, f"the body is {error}") from None
    values = _known(given, _CHAT if is_chat else _COMPLETION, ignore_unknown)
    content = _chat(values) if is_chat else _completion(values)
    choices, streaming = _typed(values, "n", INTEGER, 1), _typed(values, "stream_options", OBJECT, {})
    count = choices * len(content.get("prompts", "1"))
    if not 1 <= count <= MOST_SEQUENCES:
        raise ApiError(400, f"{count} sequences are asked for: 1 to {MOST_SEQUENCES} are possible", param="n")
    for unknown in streaming.keys() - {"include_usage", "include_obfuscation", "continuous_usage_stats"}:
        raise ApiError(400, f"unknown {short_json(unknown)} in stream_options", "unknown_field", "stream_options")
    return ApiRequest(
        *(_typed(values, "model", TEXT), _options(values) | _form(values), choices),
        stream=_typed(values, "stream", FLAG, False),
        usage=_typed(streaming, "include_usage", FLAG, False),
        counts_always=_typed(streaming, "continuous_usage_stats", FLAG, False),  # as in vLLM
        **content,
    )


def _chat(values: Mapping[str, Any]) -> dict[str, Any]:
    template = dict(_typed(values, "chat_template_kwargs", OBJECT, {}))  # as in vLLM
    think = _typed(template, "enable_thinking", FLAG)
    template.pop("enable_thinking", None)
    top, tools = _count(values, "top_logprobs"), tools_of(values)
    logprobs = (top or 0) if _typed(values, "logprobs", FLAG, False) else None
    if top and logprobs is None:
        raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
    for name, is_given in ((_FORM, bool(_form(values))), ("logprobs", logprobs is not None)):
        if tools is not None and is_given:
            raise ApiError(400, f"{name} cannot be used with tools", "unsupported_field", name)
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages is not a list of messages", param="messages")
    return {
        "messages": [_message(message, f"messages[{number}]") for number, message in enumerate(messages)],
        "think": think,
        "variables": template,
        "effort": _typed(values, "reasoning_effort", TEXT),
        "logprobs": logprobs,
        "tools": tools,
    }


def _message(value: Any, where: str) -> ChatMessage:
    role = value.get("role") if isinstance(value, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(400, f"{where} is not an object with a role of {', '.join(_ROLES)}", param=where)
    more, content = message_fields(value, where), value.get("content")
    if isinstance(content, str):
        return ChatMessage(_ROLES[role], content, more=more)
    parts = content or [] if content or more or role == "assistant" else None
    if not isinstance(parts, list) or not all(map(_is_part, parts)):
        raise ApiError(400, f"the content of {where} is neither text nor a list of text parts", param=where)
    text = "".join(part["text"] for part in parts if part["type"] == "text")
    # Templates that take parts from users write lists of others as they are.
    keeps = role in ("user", "assistant") or any(part["type"] != "text" for part in parts)
    return ChatMessage(_ROLES[role], text, more=more | ({"content": parts} if parts and keeps else {}))


def _is_part(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind == "thinking" or (kind == "text" and isinstance(part.get("text"), str))


def _completion(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompts of a completion, each a text or token ids, and its logprobs."""
    given = values.get("prompt")
    prompts = given if isinstance(given, list) and not _is_ids(given) else [given]
    if not prompts or not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in prompts):
        raise ApiError(400, "prompt is neither text, a list of texts, nor a list of token ids", param="prompt")
    return {"prompts": prompts, "logprobs": _count(values, "logprobs")}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _known(values: dict[str, Any], known: Set[str], ignore_unknown: bool) -> dict[str, Any]:
    """Return the fields that are read. Raises ApiError for unknown ones, and for what is not there."""
    if "max_completion_tokens" in values:
        if "max_tokens" in values:
            raise ApiError(400, "max_completion_tokens and max_tokens are both given", param="max_completion_tokens")
        values["max_tokens"] = values.pop("max_completion_tokens")
    for name in values.keys() - known - _IGNORED:
        if name in _NOTHING:
            if values[name] != _NOTHING[name]:
                raise ApiError(400, f"{name} is not supported", "unsupported_field", name)
        elif not ignore_unknown:
            close = [_ELSEWHERE[name]] if name in _ELSEWHERE else get_close_matches(name[:64], known, 1)
            meant = f"did you mean {close[0]}?" if close else "triforce serve --ignore-unknown passes over it"
            raise ApiError(400, f"unknown field {short_json(name)}; {meant}", "unknown_field", name[:64])
    return {name: value for name, value in values.items() if name in known}


def _typed(values: Mapping[str, Any], name: str, wanted: FieldType, usual: Any = None) -> Any:
    value = values.get(name)
    if value is None:
        return usual
    if not has_type(value, wanted):
        raise ApiError(400, f"{name} is {short_json(value)}; give {wanted[1]}", param=name)
    return value


def _count(values: Mapping[str, Any], name: str) -> int | None:
    count, most = _typed(values, name, INTEGER), _MOST_LOGPROBS[name]
    if count is not None and not 0 <= count <= most:
        raise ApiError(400, f"{name} is {short_json(count)}; 0 to {most} are possible", param=name)
    return count


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name in values.keys() & _SETTINGS.keys():
        if name in _OFF and values[name] == -1:
            options |= {"top_k": 0} if name == "top_k" else {}
            continue
        ours = "max_new_tokens" if name == "max_tokens" else name
        options[ours] = _typed(values, name, _SETTINGS[name])
        try:
            check_part({ours: options[ours]})
        except SettingsError as error:  # in terms of options: here they are fields
            message = error.message.replace(ours.replace("_", "-"), name, 1)
            raise ApiError(400, f"{message}; {error.hint.replace('--', '')}", param=name) from None
    if options.get("draft", "none") not in _DRAFTS:
        raise ApiError(400, f"draft is {options['draft']!r}; a request may have {' or '.join(_DRAFTS)}", param="draft")
    if "stop" in values:
        stops = [values["stop"]] if isinstance(values["stop"], str) else values["stop"]
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops) or len(stops) > MOST_STOPS:
            raise ApiError(400, f"stop is neither text nor a list of up to {MOST_STOPS} texts", param="stop")
        options["stop"] = tuple(stops)
    return options


def _form(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constraint of `response_format` as an option, none for text. Raises ApiError."""
    form = _typed(values, _FORM, OBJECT, {"type": "text"})
    kind = form.get("type")
    if kind == "text":
        return {}
    if kind not in ("json_object", "json_schema"):
        message = f"{_FORM} {short_json(kind)} is not supported: text, json_object and json_schema are"
        raise ApiError(400, message, "unsupported_field", _FORM)
    schema = _typed(form, "json_schema", OBJECT, {}).get("schema", form.get("schema"))  # the latter as in llama.cpp
    schema = {"type": "object"} if schema is None and kind == "json_object" else schema
    if not isinstance(schema, dict):
        raise ApiError(400, f"{_FORM} has no schema, which is an object in json_schema", param=_FORM)
    return {"constraint": Constraint(JSON_SCHEMA, json.dumps(schema))}
