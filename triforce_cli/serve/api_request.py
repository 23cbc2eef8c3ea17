"""Requests of the OpenAI API: JSON -> what is to be generated. What is not supported is refused, never left out.

Knows nothing of a model. Fields that change the answer and that no code reads are errors; those that do not, such as
`user`, are ignored.
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from offload.errors import SettingsError
from offload.loading.tokenizers.chat_template import ChatMessage
from offload.settings.config import check_part
from offload.settings.constraint import JSON_SCHEMA, Constraint
from offload.short_repr import short_repr

from ..options.other_names import hint_for
from .api_errors import ApiError, sound
from .bodies import Prompt, messages_of, prompts_of
from .tools import ToolRequest, tools_of

MOST_SEQUENCES = 16  # of one request
MOST_STOPS = 16
MOST_LOGPROBS_OF_CHATS, MOST_LOGPROBS = 20, 5  # of the likeliest tokens, for each token of a chat and of a completion

_API_NAMES = {"max-new-tokens": "max_tokens"}  # of options, where they have another one here
_LONGEST_NAME = 64  # characters of a field's name that is compared with the known ones

_NUMBER, _INTEGER, _TEXT = ((int, float), "a number"), ((int,), "a whole number"), ((str,), "a text")
_OBJECT, _FLAG = ((dict,), "an object"), ((bool,), "true or false")
# The settings that a request may have, by their names in the API: the type, and our name where it is another one.
_SETTINGS: dict[str, tuple[tuple[tuple[type, ...], str], str]] = {
    **{name: (_NUMBER, name) for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty")},
    **{name: (_NUMBER, name) for name in ("min_p", "repetition_penalty", "dry_multiplier", "dry_base")},
    **{name: (_INTEGER, name) for name in ("seed", "top_k", "dry_allowed_length", "dry_range", "no_repeat_ngram")},
    "max_tokens": (_INTEGER, "max_new_tokens"),
    **{name: (_TEXT, name) for name in ("method", "draft", "tree")},
    **{name: (_INTEGER, name) for name in ("budget", "gamma1", "gamma2")},
}
_DRAFTS = ("lookup", "none")  # others need memory that was not planned
_IGNORED = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"}
_COMMON = {"model", "n", "stop", "stream", "stream_options", "response_format", "logprobs"}
# Fields of functions that are not there, and the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
}
_STREAM_OPTIONS = {"include_usage", "include_statistics", "include_obfuscation"}  # the last is ignored: padding
_TEMPLATE = "chat_template_kwargs"
_TOP = "top_logprobs"


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A request: `messages` of a chat, or `prompts` to continue, each answered `choices` times.

    Args:
        model: the name that it asks for; None for whatever runs.
        options: settings by name, as `Settings.values`.
        think: whether a reasoning model is to think; None where the request does not say.
        stream, usage, statistics: whether to stream, and with what at the end and beside the text.
        tools: that the answer may call; None for none.
        logprobs: how many of the likeliest tokens' log-probabilities each token has beside its own; None for none.
    """

    model: str | None
    options: Mapping[str, Any]
    choices: int
    stream: bool
    usage: bool
    statistics: bool
    messages: Sequence[ChatMessage] | None = None
    prompts: Sequence[Prompt] = ()
    think: bool | None = None
    logprobs: int | None = None
    tools: ToolRequest | None = None

    @property
    def content(self) -> str:
        """The name of the field that has what is to be answered."""
        return "prompt" if self.messages is None else "messages"

    @property
    def sequences(self) -> int:
        """The number of answers."""
        return self.choices * (1 if self.messages is not None else len(self.prompts))


def parse_chat(data: bytes, ignore_unknown: bool = False) -> ApiRequest:
    """Return the request of /v1/chat/completions, perhaps without the fields that nobody knows. Raises ApiError."""
    values = _known(_object(data), {"messages", "tools", "tool_choice", _TEMPLATE, _TOP}, ignore_unknown)
    messages, tools = messages_of(values.get("messages")), tools_of(values)
    more = {"think": _think(values), "logprobs": _chat_logprobs(values), "tools": tools}
    if tools is not None and (more["logprobs"] is not None or _form(values)):
        other = _FORM if _form(values) else "logprobs"
        raise ApiError(400, f"{other} cannot be used with tools", "unsupported_field", other)
    return _request(values, 1, messages=messages, **more)


def parse_completion(data: bytes, ignore_unknown: bool = False) -> ApiRequest:
    """Return the request of /v1/completions, perhaps without the fields that nobody knows. Raises ApiError."""
    values = _known(_object(data), {"prompt"}, ignore_unknown)
    prompts = prompts_of(values.get("prompt"))
    return _request(values, len(prompts), prompts=prompts, logprobs=_completion_logprobs(values))


def _request(values: Mapping[str, Any], count: int, **content: Any) -> ApiRequest:
    choices = _typed(values, "n", _INTEGER, 1)
    if not 1 <= choices * count <= MOST_SEQUENCES:
        raise ApiError(400, f"{count} x {choices} sequences: 1 to {MOST_SEQUENCES} are possible", param="n")
    streaming = _typed(values, "stream_options", ((dict,), "an object"), {})
    _check_keys(streaming, _STREAM_OPTIONS, "stream_options")
    flag = ((bool,), "true or false")
    return ApiRequest(
        *(_typed(values, "model", _TEXT, None), _options(values) | _form(values), choices),
        stream=_typed(values, "stream", flag, False),
        usage=_typed(streaming, "include_usage", flag, False),
        statistics=_typed(streaming, "include_statistics", flag, False),
        **content,
    )


def _object(data: bytes) -> dict[str, Any]:
    try:
        values = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON in UTF-8: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, f"the body is no JSON object but {short_repr(values)}")
    return {name: value for name, value in values.items() if value is not None}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _known(values: Mapping[str, Any], content: set[str], ignore_unknown: bool) -> dict[str, Any]:
    """Return the fields by the API's names: other programs' names of equal meaning are accepted, and unknown fields
    left out where that is wanted. Raises ApiError for those, and for fields that ask for what is not there."""
    known = _COMMON | content | _IGNORED | _SETTINGS.keys() | _UNSUPPORTED.keys()
    found = {}
    for name, value in values.items():
        field = _field(name, known)
        if field not in known:
            if ignore_unknown:
                continue
            raise _unknown(name, known)
        if field in found or (field != name and field in values):
            raise ApiError(400, f"{name} is another name of {field}, and both are given", param=name)
        found[field] = value
    _check_supported({name: value for name, value in found.items() if name not in content})
    return found


def _field(name: str, known: Set[str]) -> str:
    """Return the API's name of a field; the name itself if it is that, or if nobody knows it."""
    return {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}.get(name, name)


def _check_supported(values: Mapping[str, Any]) -> None:
    """Raise ApiError for fields that ask for what is not there."""
    for name, value in values.items():
        if name in _UNSUPPORTED and not any(type(value) is type(each) and value == each for each in _UNSUPPORTED[name]):
            raise ApiError(400, f"{name} is not supported", "unsupported_field", name)


def _check_keys(given: Mapping[str, Any], known: Set[str], where: str) -> None:
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise ApiError(400, f"unknown {short_repr(unknown)} in {where}", "unknown_field", where)


def _unknown(name: str, known: Set[str]) -> ApiError:
    shown = short_repr(name)  # which has no half of a surrogate pair either
    close = get_close_matches(name, known, 1) if len(name) <= _LONGEST_NAME else []
    meant = f"; did you mean {close[0]}?" if close else ""
    hint = hint_for(name) if len(name) <= _LONGEST_NAME else ""
    meant = f"; {hint}" if hint else meant
    fields = ", ".join(sorted(known - _UNSUPPORTED.keys() - _IGNORED))
    message = f"unknown field {shown}{meant}; known are {fields}; triforce serve --ignore-unknown passes over others"
    return ApiError(400, message, "unknown_field", shown[1:-1])


def _typed(values: Mapping[str, Any], name: str, wanted: tuple[tuple[type, ...], str], usual: Any) -> Any:
    types, described = wanted
    value = values.get(name)
    if value is None:
        return usual
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ApiError(400, f"{name} is {short_repr(value)}; give {described}", param=name)
    return value


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name in values.keys() & (_SETTINGS.keys() | {"stop"}):
        kind, ours = _SETTINGS.get(name, (None, name))
        found[ours] = _stops(values[name]) if kind is None else _typed(values, name, kind, None)
        if name == "draft" and found[ours] not in _DRAFTS:
            message = f"draft is {short_repr(found[ours])}; a request may have {' or '.join(_DRAFTS)}"
            raise ApiError(400, message, param=name)
        try:
            check_part({ours: found[ours]})
        except SettingsError as error:  # in terms of options: here they are fields
            message = error.message.replace(ours.replace("_", "-"), name, 1)
            raise ApiError(400, f"{message}; {error.hint.replace('--', '')}", param=name) from None
    return found


_FORM = "response_format"


def _form(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constraint of `response_format` as an option, none for text. Raises ApiError."""
    form = _typed(values, _FORM, _OBJECT, {"type": "text"})
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        known = "text, json_object and json_schema are"
        raise ApiError(400, f"{_FORM} {short_repr(kind)} is not supported: {known}", "unsupported_field", _FORM)
    _check_keys(form, {"type", "json_schema"} if kind == "json_schema" else {"type"}, _FORM)
    if kind == "text":
        return {}
    given = _typed(form, "json_schema", _OBJECT, {})
    _check_keys(given, {"name", "description", "schema", "strict"}, _FORM)
    _typed(given, "strict", _FLAG, None)  # the answer follows the schema in any case
    if kind == "json_schema" and not isinstance(given.get("schema"), dict):
        raise ApiError(400, f"{_FORM} has no schema, which is an object in json_schema", param=_FORM)
    return {"constraint": Constraint(JSON_SCHEMA, json.dumps(given.get("schema", {"type": "object"})))}


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts) or len(texts) > MOST_STOPS:
        raise ApiError(400, f"stop is no text, and no list of up to {MOST_STOPS} texts", param="stop")
    return tuple(sound(each, "stop") for each in texts)


def _think(values: Mapping[str, Any]) -> bool | None:
    """Return the switch of `chat_template_kwargs`, as in vLLM."""
    given = _typed(values, _TEMPLATE, ((dict,), "an object"), {})
    if given.keys() - {"enable_thinking"}:
        raise ApiError(400, f"{_TEMPLATE} may have enable_thinking alone", "unsupported_field", _TEMPLATE)
    return _typed(given, "enable_thinking", ((bool,), "true or false"), None)


def _chat_logprobs(values: Mapping[str, Any]) -> int | None:
    """Return how many likely tokens a chat asks for beside each: `logprobs` switches on, `top_logprobs` counts."""
    is_wanted = _typed(values, "logprobs", ((bool,), "true or false"), False)
    count = _counted(values, _TOP, MOST_LOGPROBS_OF_CHATS)
    if count and not is_wanted:
        raise ApiError(400, f'{_TOP} needs "logprobs": true', param=_TOP)
    return count or 0 if is_wanted else None


def _completion_logprobs(values: Mapping[str, Any]) -> int | None:
    """Return how many likely tokens a completion asks for beside each; false is none, as where it says nothing."""
    return None if values.get("logprobs") is False else _counted(values, "logprobs", MOST_LOGPROBS)


def _counted(values: Mapping[str, Any], name: str, most: int) -> int | None:
    count = _typed(values, name, _INTEGER, None)
    if count is not None and not 0 <= count <= most:
        raise ApiError(400, f"{name} is {short_repr(count)}; 0 to {most} are possible", param=name)
    return count
