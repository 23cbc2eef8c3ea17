"""How chat templates write calls of tools: the grammar of an answer that may or must call one, and the calls in a text.

Hermes and Qwen: `<tool_call>` around a JSON object; Mistral: a list, or name and arguments, after [TOOL_CALLS]; Llama
3: a JSON object alone. A format is a row here.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import PromptError
from ...short_repr import short_repr
from .chat_template import ASSISTANT, USER, ChatTemplate
from .thinking import FORMATS as THINKING
from .thinking import overlap


class Tool(NamedTuple):
    """A function that the model may call, with the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Calls are `begin` NAME `middle` ARGUMENTS `end`.

    With `between`, several calls stand between `begin` and `end`: `between` NAME `middle` ARGUMENTS each.
    """

    begin: str
    middle: str
    end: str
    trigger: str  # what `begin` begins with: from there on, a text is a call
    between: str = ""
    id_length: int | None = None  # of a call's id, where the template wants just so many letters and digits

    @property
    def is_alone(self) -> bool:
        """Return whether calls have no mark, so that only a whole answer can be calls."""
        return self.begin.startswith("{")


_NAMED, _ARGUMENTS, _NEXT, _MISTRAL = '{"name": "', '", "arguments": ', '}, {"name": "', "[TOOL_CALLS]"
FORMATS = (
    ToolFormat(_MISTRAL, "[ARGS]", "", _MISTRAL, id_length=9),
    *(ToolFormat(f"{_MISTRAL}{blank}[{_NAMED}", _ARGUMENTS, "}]", _MISTRAL, _NEXT, 9) for blank in (" ", "")),
    ToolFormat(f"<tool_call>\n{_NAMED}", _ARGUMENTS, "}\n</tool_call>", "<tool_call>"),
    ToolFormat(_NAMED, '", "parameters": ', "}", _NAMED),
)
_PROBE = "weather_in_oslo"
_CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": _PROBE, "arguments": {"place": "Oslo"}}}
_NOTHING = {"type": "object", "properties": {}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": _NOTHING}}


def tool_format(template: ChatTemplate) -> ToolFormat:
    """Return the format in which a chat template writes a call. Raises PromptError if that is none of FORMATS."""
    asked = {"role": USER, "content": "Hello"}
    called = {"role": ASSISTANT, "content": "", "tool_calls": [_CALL]}
    begun = template.render([asked], tools=[_TOOL])
    try:
        before, found, after = template.render([asked, called], tools=[_TOOL]).rpartition(_PROBE)
    except PromptError:
        before, found, after = "", "", ""
    if not found:
        raise PromptError("this model's chat template has no calls of tools", "use another model")
    for form in FORMATS:
        head = before.removesuffix(form.begin)
        for thinking in THINKING:  # an empty one may stand before the call
            head = re.sub(f"{re.escape(thinking.opening)}\\s*{re.escape(thinking.closing)}\\s*$", "", head)
        if head != before and begun.startswith(head.rstrip()) and after.startswith(form.middle + "{"):
            return form
    same = next((at for at, pair in enumerate(zip(begun, before, strict=False)) if len(set(pair)) > 1), len(begun))
    mark = short_repr(before[max(before.rfind("\n", 0, same), 0) :].strip() + "NAME" + after[:20])
    raise PromptError(
        f"this model's chat template writes calls in a way that is not known: {mark}", "use another model"
    )


_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}


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
    if form.is_alone:
        calls = "call+" if has_several else "call"
        text = f"TEXT: /(.|\\n)*/ & ~/\\s*{re.escape(form.begin)}(.|\\n)*/"
        return f"start: {calls} | TEXT\ncall: {parts(form.begin)} {rest}\n{text}\n"
    if form.trigger in special:
        return f"start: {start}\ncall: TEXT {parts(form.trigger)} {rest}\nTEXT: /(.|\\n)*/\n"
    return f"start: {start}\ncall: opening {rest}\nopening[lazy]: TEXT {parts(form.trigger)}\nTEXT: /(.|\\n)*/\n"


class Call(NamedTuple):
    """A call in an answer: the name of a tool, and the text of its arguments, a JSON object."""

    name: str
    arguments: str


class CallReader:
    """Separates calls from the text around them, as it streams. A call is returned once it is whole."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._pending, self._waits = "", form.begin  # for what the pending text must contain to go on
        self._is_content = False  # the answer has begun with a text, and calls have no mark
        self.calls = 0

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """Return the text and the calls that have become final."""
        self._pending += text
        content, calls, form = "", list[Call](), self._form
        while True:
            if self._waits == form.begin and self._begins_as_text():
                content, self._pending = content + self._pending, ""
                return content, calls
            if self._waits == form.end and form.between and self._pending.startswith(form.between):
                self._waits = form.between
            elif self._waits == form.end and form.between.startswith(self._pending) and form.between:
                return content, calls  # too short to tell
            before, found, after = self._pending.partition(self._waits)
            if not found:
                return content + self._let_through(), calls
            if self._waits in (form.begin, form.between):
                if (call := self._read(after)) is None:
                    self._pending = found + after
                    return content + before, calls
                calls.append(call)
                content, self.calls, self._waits = content + before, self.calls + 1, form.end
            else:
                self._pending, self._waits = after, form.begin
            if not self._waits:  # without an end
                self._waits = form.begin

    def _begins_as_text(self) -> bool:
        begun, begin = self._pending.lstrip(), self._form.begin
        if self._form.is_alone and not (begun.startswith(begin) or begin.startswith(begun)):
            self._is_content = True
        return self._is_content

    def _read(self, text: str) -> Call | None:
        """Return the call whose name a text begins with, and keep what follows it; None until it is whole."""
        name, found, rest = text.partition(self._form.middle)
        try:
            _, end = json.JSONDecoder().raw_decode(rest if found else "")
        except (ValueError, RecursionError):
            return None
        self._pending = rest[end:]
        return Call(name, rest[:end])

    def _let_through(self) -> str:
        """Return the pending text that is not a call, without what may be the beginning of one."""
        if self._waits != self._form.begin:
            return ""
        kept = overlap(self._pending, self._form.begin)
        text, self._pending = self._pending[: len(self._pending) - kept], self._pending[len(self._pending) - kept :]
        return text.strip() if self.calls and not text.strip() else text

    def flush(self) -> str:
        """Return the text that is pending at the end, unless a call has begun."""
        pending, self._pending = self._pending, ""
        has_begun = self._waits != self._form.begin or pending.startswith(self._form.trigger)
        return "" if has_begun else pending
