"""How chat templates write calls of tools: the grammar of an answer that may or must call one, and the calls in a text.

Hermes and Qwen: `<tool_call>` around a JSON object; Mistral: a list, or name and arguments, after [TOOL_CALLS]; Llama
3: a JSON object alone. A format is a row here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .thinking import overlap


class Tool(NamedTuple):
    """A function that the model may call, with the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Calls are `begin` NAME `middle` ARGUMENTS `end`; templates that write them contain all of `marks`.

    With `between`, several calls stand between `begin` and `end`: `between` NAME `middle` ARGUMENTS each.
    """

    marks: tuple[str, ...]
    begin: str
    middle: str
    end: str
    trigger: str  # what `begin` begins with: from there on, a text is a call
    between: str = ""
    id_length: int | None = None  # of a call's id, where the template wants just so many letters and digits


_NAMED, _NEXT = '{"name": "', '}, {"name": "'
FORMATS = (
    ToolFormat(("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", "[ARGS]", "", "[TOOL_CALLS]", id_length=9),
    *(
        ToolFormat((mark,), f"{mark}{_NAMED}", '", "arguments": ', "}]", "[TOOL_CALLS]", _NEXT, 9)
        for mark in ("[TOOL_CALLS] [", "[TOOL_CALLS][")
    ),
    ToolFormat(("[TOOL_CALLS]",), f"[TOOL_CALLS][{_NAMED}", '", "arguments": ', "}]", "[TOOL_CALLS]", _NEXT, 9),
    ToolFormat(("<tool_call>",), '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "<tool_call>"),
    ToolFormat(('"parameters": ', "ipython"), '{"name": "', '", "parameters": ', "}", '{"name": "'),
)
_OTHERS = ("<function=", "<arg_key>")  # of templates whose calls are written in another way


def tool_format(template: str) -> ToolFormat | None:
    """Return the format of a chat template's calls; None if it has none, or one that is not here."""
    if "tools" not in template or any(mark in template for mark in _OTHERS):
        return None
    return next((each for each in FORMATS if all(mark in template for mark in each.marks)), None)


_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def calls_grammar(
    form: ToolFormat, tools: Sequence[Tool], is_required: bool, special: Mapping[str, int], has_several: bool = True
) -> str:
    """Return the grammar, in Lark's notation, of a text that calls, or that may have calls in it: several, or one.

    `special` are the ids of special tokens by their names, which stand for themselves in it.
    """

    def parts(text: str) -> str:
        for name, token in special.items():
            before, found, after = text.partition(name)
            if found:
                return f"{parts(before)} <[{token}]> {parts(after)}"
        return json.dumps(text) if text else ""

    schemas = [json.dumps(dict(tool.parameters) | {"x-guidance": _FORM}) for tool in tools]
    named = [f"{parts(tool.name + form.middle)} %json {schema}" for tool, schema in zip(tools, schemas, strict=True)]
    one = f"({' | '.join(named)})"
    more = f"({parts(form.between)} {one})*" if form.between and has_several else ""
    rest = f"{parts(form.begin.removeprefix(form.trigger))} {one} {more} {parts(form.end)}"
    if is_required:
        return f"start: {parts(form.trigger)} {rest}\n"
    start = "call* TEXT" if has_several else "call | TEXT"  # nothing follows a call that is alone
    if form.trigger in special:
        return f"start: {start}\ncall: TEXT {parts(form.trigger)} {rest}\nTEXT: /(.|\\n)*/\n"
    return f"start: {start}\ncall: opening {rest}\nopening[lazy]: TEXT {parts(form.trigger)}\nTEXT: /(.|\\n)*/\n"


class CallPiece(NamedTuple):
    """A part of a call that has become final: its number, its name where it begins, and a part of its arguments."""

    call: int
    name: str | None
    arguments: str


class CallReader:
    """Separates calls from the text around them, as it streams."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._pending, self._waits = "", form.begin  # for what the pending text must contain to go on
        self._depth, self._is_text, self._is_escaped = 0, False, False  # of the arguments
        self.calls = 0

    def feed(self, text: str) -> tuple[str, list[CallPiece]]:
        """Return the text and the parts of calls that have become final."""
        self._pending += text
        content, pieces = "", list[CallPiece]()
        while True:
            if self._depth:
                if arguments := self._arguments():
                    pieces.append(CallPiece(self.calls - 1, None, arguments))
                if self._depth:
                    return content, pieces
                self._waits = self._form.end or self._form.begin
                continue
            if self._waits == self._form.end and self._form.between:
                if self._pending.startswith(self._form.between):
                    self._pending, self._waits = self._pending[len(self._form.between) :], self._form.middle
                elif self._form.between.startswith(self._pending):
                    return content, pieces  # too short to tell
            before, found, after = self._pending.partition(self._waits)
            if not found:
                return content + self._let_through(), pieces
            self._pending = after
            if self._waits == self._form.begin:
                content += before
                self._waits = self._form.middle
            elif self._waits == self._form.middle:
                pieces.append(CallPiece(self.calls, before, ""))
                self.calls, self._depth = self.calls + 1, -1
            else:
                self._waits = self._form.begin

    def _let_through(self) -> str:
        """Return the pending text that is no call, without what may be the beginning of one."""
        if self._waits != self._form.begin:
            return ""
        kept = overlap(self._pending, self._form.begin)
        text, self._pending = self._pending[: len(self._pending) - kept], self._pending[len(self._pending) - kept :]
        return text.strip() if self.calls and not text.strip() else text

    def _arguments(self) -> str:
        """Return the pending part of the arguments, a JSON object, up to its end."""
        for at, character in enumerate(self._pending):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_text:
                self._is_escaped = character == "\\"
                self._is_text = character != '"'
            elif character == '"':
                self._is_text = True
            elif character in "{[":
                self._depth = max(self._depth, 0) + 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    found, self._pending = self._pending[: at + 1], self._pending[at + 1 :]
                    return found
        found, self._pending = self._pending, ""
        return found

    def flush(self) -> str:
        """Return the text that is pending at the end: it was no call."""
        pending, self._pending = self._pending, ""
        return pending if self._waits == self._form.begin else ""
