"""Tools of a chat's request, the messages with their calls, and the calls of an answer in the form of OpenAI's API."""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.loading.tokenizers.tokenizer import Tokenizer
from offload.loading.tokenizers.tool_calls import CallReader, Tool, ToolFormat, calls_grammar
from offload.settings.constraint import GRAMMAR, Constraint
from offload.short_repr import short_repr

from .errors import ApiError

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
    given, choice = values.get("tools") or [], values.get("tool_choice", "auto")
    named = _name_of(choice)
    if named is None and choice not in _CHOICES:
        message = f"tool_choice is {short_repr(choice)}; give {', '.join(_CHOICES)} or a function"
        raise ApiError(400, message, param="tool_choice")
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise ApiError(400, f"tools is no list of up to {MOST_TOOLS} tools", param="tools")
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given)]
    called = [tool for tool in tools if named in (None, tool.name)]
    if not called and (named is not None or choice == "required"):
        message = "tool_choice asks for a call, and there are no tools"
        message = f"tool_choice names {short_repr(named)}, which is none of the tools" if tools else message
        raise ApiError(400, message, param="tool_choice")
    several = values.get("parallel_tool_calls", True)
    if not isinstance(several, bool):
        raise ApiError(400, "parallel_tool_calls is neither true nor false", param="parallel_tool_calls")
    if not tools or choice == "none":
        return None
    return ToolRequest(given, called, named is not None or choice == "required", several and named is None)


def _name_of(value: Any) -> str | None:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _tool(value: Any, where: str) -> Tool:
    name = _name_of(value)
    if name is None or not _NAME(name):
        message = f'{where} has not the type "function", and a function with a name of letters, digits, _ . and -'
        raise ApiError(400, message, param=where)
    parameters = value["function"].get("parameters") or {"properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ApiError(400, f"the parameters of {name} are no schema of an object", param=where)
    return Tool(name, {"type": "object"} | parameters)


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
    return {"tool_calls": [_call(call, where) for call in calls]} if calls else {}


def _call(value: Any, where: str) -> dict[str, Any]:
    try:
        function = value["function"]
        called = {"name": str(function["name"]), "arguments": json.loads(function["arguments"] or "{}")}
        json.dumps(called, ensure_ascii=False).encode()  # raises for half a surrogate pair
        return {"id": str(value.get("id", "")), "type": "function", "function": called}
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError):
        raise ApiError(400, f"a tool call of {where} has no function with name and arguments", param=where) from None


class CallDeltas:
    """The calls of one answer, as its text comes."""

    def __init__(self, form: ToolFormat) -> None:
        self._reader, self._id_length, self.calls = CallReader(form), form.id_length, list[dict[str, Any]]()

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the answer's text, and the entries of `tool_calls` in deltas that have become final."""
        content, pieces = self._reader.feed(text)
        return content, [delta for piece in pieces for delta in self._deltas(piece.call, piece.name, piece.arguments)]

    def _deltas(self, index: int, name: str | None, arguments: str) -> Iterator[dict[str, Any]]:
        if name is not None:
            head = {"id": f"call_{secrets.token_hex(12)}"[-(self._id_length or 0) :], "type": "function"}
            self.calls.append(head | {"function": {"name": name, "arguments": ""}})
            yield {"index": index} | head | {"function": {"name": name, "arguments": ""}}
        if arguments:
            self.calls[index]["function"]["arguments"] += arguments
            yield {"index": index, "function": {"arguments": arguments}}

    def flush(self) -> str:
        """Return the text that is left at the end."""
        return self._reader.flush()

    @property
    def are_whole(self) -> bool:
        """Whether there are calls, and no stop string has cut the arguments of the last one."""
        try:
            return bool(self.calls) and isinstance(json.loads(self.calls[-1]["function"]["arguments"]), dict)
        except (ValueError, RecursionError):
            return False
