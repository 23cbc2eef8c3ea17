"""Tools of a chat's request, the messages with their calls, and the calls of an answer in the form of OpenAI's API."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from offload.constraints.grammar import closed_schema
from offload.loading.tokenizers.tool_calls import CallReader, Tool, ToolFormat, calls_grammar
from offload.settings.constraint import GRAMMAR, Constraint
from offload.short_repr import short_json

from .errors import ApiError

MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}").fullmatch
_NOTHING = {"type": "object", "properties": {}}  # the parameters of a function without any
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

    def constraint(self, form: ToolFormat, special_ids: Mapping[str, int]) -> Constraint:
        """Return what the answer must match, in a model's form of calls and with its special tokens."""
        return Constraint(GRAMMAR, calls_grammar(form, self.tools, self.is_required, special_ids, self.has_several))


def tools_of(values: Mapping[str, Any]) -> ToolRequest | None:
    """Return the tools of a request's fields; None without any, or where none may be called. Raises ApiError."""
    given, choice = values.get("tools") or [], values.get("tool_choice", "auto")
    named = _name_of(choice)
    if named is None and choice not in _CHOICES:
        message = f"tool_choice is {short_json(choice)}; give {', '.join(_CHOICES)} or a function"
        raise ApiError(400, message, param="tool_choice")
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise ApiError(400, f"tools is not a list of up to {MOST_TOOLS} tools", param="tools")
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given)]
    called = [tool for tool in tools if named in (None, tool.name)]
    if not called and (named is not None or choice == "required"):
        message = "tool_choice asks for a call, and there are no tools"
        message = f"tool_choice names {short_json(named)}, which is none of the tools" if tools else message
        raise ApiError(400, message, param="tool_choice")
    several = values.get("parallel_tool_calls", True)
    if not isinstance(several, bool):
        raise ApiError(400, "parallel_tool_calls is neither true nor false", param="parallel_tool_calls")
    if not tools or choice == "none":
        return None
    given = [_complete(tool) for tool in given]
    return ToolRequest(given, called, named is not None or choice == "required", several and named is None)


def _complete(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as templates expect it: its function has parameters, and no fields without a value."""
    function = {name: value for name, value in tool["function"].items() if value is not None}
    given = {name: value for name, value in (function.get("parameters") or {}).items() if value is not None}
    missing = {name: value for name, value in _NOTHING.items() if name not in given}
    return dict(tool) | {"function": function | {"parameters": given | missing}}


def _name_of(value: Any) -> str | None:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _tool(value: Any, where: str) -> Tool:
    name = _name_of(value)
    if name is None or not _NAME(name):
        message = f'{where} has not the type "function", and a function with a name of letters, digits, _ . and -'
        raise ApiError(400, message, param=where)
    parameters = value["function"].get("parameters") or _NOTHING  # as in OpenAI's API
    if not isinstance(parameters, dict) or (parameters.get("type") or "object") != "object":
        raise ApiError(400, f"the parameters of {name} are no schema of an object", param=where)
    return Tool(name, closed_schema(parameters | {"type": "object"}))


def message_fields(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what a message has beside its role and content, as chat templates want it. Raises ApiError."""
    fields = {name: each for name, each in value.items() if each is not None and name not in ("role", "content")}
    if value["role"] == "tool" and not isinstance(value.get("tool_call_id"), str):
        raise ApiError(400, f"{where} has no tool_call_id, which is a text", param=where)
    calls = fields.pop("tool_calls", None) or []
    if calls and (not isinstance(calls, list) or value["role"] != "assistant"):
        raise ApiError(400, f"tool_calls of {where} is not a list of an assistant's message", param=where)
    return fields | ({"tool_calls": [_call(call, where) for call in calls]} if calls else {})


def _call(value: Any, where: str) -> dict[str, Any]:
    """Return a call with its arguments as an object, where they are one: a call that was cut has a part of it."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"a tool call of {where} has no function with a name", param=where)
    arguments = function.get("arguments") or "{}"
    with suppress(ValueError, TypeError, RecursionError):
        found = json.loads(arguments)
        json.dumps(found, ensure_ascii=False).encode()  # raises for half a surrogate pair
        arguments = found if isinstance(found, dict) else arguments
    return value | {"type": "function", "function": function | {"arguments": arguments}}


class AnsweredCalls:
    """The calls of one answer, as its text comes, in the form of OpenAI's API."""

    def __init__(self, form: ToolFormat) -> None:
        self._reader, self._id_length, self.calls = CallReader(form), form.id_length, list[dict[str, Any]]()
        self.flush = self._reader.flush

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the answer's text, and the entries of `tool_calls` in deltas, that have become final."""
        content, calls = self._reader.feed(text)
        before = len(self.calls)
        for call in calls:
            id = f"call_{secrets.token_hex(12)}"[-(self._id_length or 0) :]
            self.calls.append({"id": id, "type": "function", "function": call._asdict()})
        return content, [{"index": at, **self.calls[at]} for at in range(before, len(self.calls))]
