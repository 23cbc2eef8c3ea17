"""Tools of a chat's request, the messages with their calls, and the calls of an answer in the form of OpenAI's API."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.errors import SettingsError
from offload.loading.tokenizers.tokenizer import Tokenizer
from offload.loading.tokenizers.tool_calls import CallPiece, CallReader, Tool, ToolFormat, calls_grammar
from offload.settings.constraint import GRAMMAR, JSON_SCHEMA, Constraint
from offload.short_repr import short_repr

from .api_errors import ApiError, sound

MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}").fullmatch
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The tools that an answer may call, as the request has them; with `is_required` it is a call of one of `tools`.

    It has one call at most, unless it `has_several`.
    """

    given: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool]
    is_required: bool
    has_several: bool = True

    def check(self, check: Any) -> None:
        """Raise ApiError for a schema of arguments that `check` refuses with a SettingsError."""
        for tool in self.tools:
            schema = Constraint(JSON_SCHEMA, json.dumps(tool.parameters))
            check_schema(check, schema, "tools", f"the parameters of {tool.name}: ")

    def constraint(self, tokenizer: Tokenizer) -> Constraint:
        """Return what the answer must match. Raises ApiError for a model whose template has no tools."""
        form = self.form(tokenizer)
        text = calls_grammar(form, self.tools, self.is_required, tokenizer.special_ids, self.has_several)
        return Constraint(GRAMMAR, text)

    def form(self, tokenizer: Tokenizer) -> ToolFormat:
        """Return how the model writes calls. Raises ApiError."""
        form = tokenizer.tool_format
        if form is None:
            message = "this model's chat template has no tools, or writes their calls in a way that is not known"
            raise ApiError(400, message, "unsupported_field", "tools")
        return form


def tools_of(values: Mapping[str, Any]) -> ToolRequest | None:
    """Return the tools of a request's fields; None without any, or where none may be called. Raises ApiError."""
    given, choice = values.get("tools"), values.get("tool_choice", "auto")
    named = _named(choice)
    if named is None and choice not in _CHOICES:
        message = f"tool_choice is {short_repr(choice)}; give {', '.join(_CHOICES)} or a function"
        raise ApiError(400, message, param="tool_choice")
    if not given:
        if named is not None or choice == "required":
            raise ApiError(400, "tool_choice asks for a call, and there are no tools", param="tool_choice")
        return None
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise ApiError(400, f"tools is no list of up to {MOST_TOOLS} tools", param="tools")
    tools = [_tool(each, f"tools[{index}]") for index, each in enumerate(given)]
    if choice == "none":
        return None
    if named is not None:
        tools = [tool for tool in tools if tool.name == named]
        if not tools:
            raise ApiError(
                400, f"tool_choice names {short_repr(named)}, which is none of the tools", param="tool_choice"
            )
    several = values.get("parallel_tool_calls", True)
    if not isinstance(several, bool):
        raise ApiError(400, "parallel_tool_calls is neither true nor false", param="parallel_tool_calls")
    return ToolRequest(given, tools, named is not None or choice == "required", several and named is None)


def _named(choice: Any) -> str | None:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _tool(value: Any, where: str) -> Tool:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict):
        raise ApiError(400, f'{where} is no object with the type "function" and a function', param=where)
    sound(json.dumps(value, ensure_ascii=False), where)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME(name):
        message = f"the name of {where} is {short_repr(name)}; give 1 to 64 letters, digits, _ . and -"
        raise ApiError(400, message, param=where)
    if not isinstance(parameters, dict):
        message = f'{where}.function has no parameters; without any they are {{"type": "object", "properties": {{}}}}'
        raise ApiError(400, message, param=where)
    if (kind := parameters.get("type", "object")) != "object":
        message = f"the parameters of {name} have the type {short_repr(kind)}; arguments are an object"
        raise ApiError(400, message, param=where)
    return Tool(name, {"type": "object"} | parameters)


def check_schema(check: Any, schema: Constraint, param: str, what: str = "") -> None:
    """Raise ApiError, with its place, for `what`, the schema in field `param`, if `check` raises SettingsError."""
    try:
        check(schema)
    except SettingsError as error:
        raise ApiError(400, f"{what}{error.message}; {error.hint}", param=param) from None


def message_fields(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what a message has beside its text: the calls of an assistant's, or the call that a tool's answers.

    Arguments are objects, as chat templates want them. Raises ApiError.
    """
    if value["role"] == "tool":
        if not isinstance(value.get("tool_call_id"), str):
            raise ApiError(400, f"{where} has no tool_call_id, which is a text", param=where)
        return {name: value[name] for name in ("tool_call_id", "name") if isinstance(value.get(name), str)}
    calls = value.get("tool_calls") or []
    if calls and (not isinstance(calls, list) or value["role"] != "assistant"):
        raise ApiError(400, f"tool_calls of {where} is no list of an assistant's message", param=where)
    return {"tool_calls": [_call(each, where) for each in calls]} if calls else {}


def _call(value: Any, where: str) -> dict[str, Any]:
    try:
        function = value["function"]
        arguments = json.loads(function["arguments"] or "{}")
        found = {"name": str(function["name"]), "arguments": arguments}
        return {"id": str(value.get("id", "")), "type": "function", "function": found}
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ApiError(400, f"a tool call of {where} has no function with name and arguments", param=where) from None


class CallDeltas:
    """The calls of one answer, as its text comes."""

    def __init__(self, form: ToolFormat) -> None:
        self._reader, self.calls = CallReader(form), list[dict[str, Any]]()
        self._id_length = form.id_length

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the answer's text and the `tool_calls` of a delta that have become final."""
        content, pieces = self._reader.feed(text)
        return content, list(map(self._delta, pieces))

    def _delta(self, piece: CallPiece) -> dict[str, Any]:
        function: dict[str, Any] = {"arguments": piece.arguments}
        if piece.name is None:
            self.calls[piece.call]["function"]["arguments"] += piece.arguments
            return {"index": piece.call, "function": function}
        head = {"id": f"call_{secrets.token_hex(12)}"[-(self._id_length or 0) :], "type": "function"}
        self.calls.append(head | {"function": {"name": piece.name, "arguments": ""}})
        return {"index": piece.call} | head | {"function": {"name": piece.name} | function}

    def flush(self) -> str:
        """Return the text that is left at the end."""
        return self._reader.flush()


def are_whole(calls: Any) -> bool:
    """Return whether there are calls, and no stop string has cut the arguments of the last one."""
    try:
        return bool(calls) and isinstance(json.loads(calls[-1]["function"]["arguments"]), dict)
    except (ValueError, RecursionError):
        return False


def whole_message(text: str, form: ToolFormat) -> dict[str, Any]:
    """Return the content of a whole message, and its calls."""
    deltas = CallDeltas(form)
    content = deltas.feed(text)[0] + deltas.flush()
    return {"content": content.strip() or None, "tool_calls": deltas.calls} if deltas.calls else {"content": content}
