"""Chat templates, rendered as transformers does without importing it, and the token ids of conversations.

A template comes with a checkpoint and is not trusted: it runs in Jinja's sandbox, as in transformers.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, meta, nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...errors import PromptError

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
_SWITCHES = ("enable_thinking", "thinking")  # variables of templates that switch thinking on and off
_PART = "a part of a content"
_PLAIN = "use --raw to go without the template, or use another model"

Encode = Callable[[str, bool], list[int]]  # a text, and whether it begins the prompt
Render = Callable[[Sequence[Mapping[str, Any]]], str]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation. `ids` are the tokens of an assistant's, if they are known.

    `more` are further values for the template, such as an assistant's calls of tools, or a content of several parts.
    """

    role: str
    content: str
    ids: tuple[int, ...] | None = None
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's text for training; when rendering, its body is used as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return JSON. Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@lru_cache(maxsize=4)
def _compiled(source: str) -> tuple[Template, Set[str]]:
    """Return a template, and the names of the variables that it reads."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(source), meta.find_undeclared_variables(environment.parse(source))


class ChatTemplate:
    """A model's chat template.

    Args:
        source: a Jinja template, or several by name, of which "tool_use" is used with tools, and "default" else.
        special_tokens: variables of the template, such as `bos_token`.
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = {"default": source} if isinstance(source, str) else source
        self._special_tokens = dict(special_tokens)

    def text(self, with_tools: bool = False) -> str:
        """Return the template for prompts with tools, or without; empty if there is none."""
        default = self._sources.get("default", "")
        return self._sources.get("tool_use", default) if with_tools else default

    def _compiled(self, with_tools: bool = False) -> tuple[Template, Set[str]]:
        try:
            return _compiled(self.text(with_tools))
        except TemplateSyntaxError as error:
            raise PromptError(f"line {error.lineno} of the model's chat template is wrong: {error}", _PLAIN) from error

    @property
    def variables(self) -> Set[str]:
        """The variables that the template reads."""
        return self._compiled()[1]

    @property
    def switch(self) -> str | None:
        """The variable that switches thinking on and off, as in the templates of Qwen3 and Granite; or None."""
        return next((name for name in _SWITCHES if name in self.variables), None)

    @property
    def takes_parts(self) -> bool:
        """Whether contents may be lists of parts."""
        parts = [{"type": "text", "text": _PART}, {"type": "text", "text": _PART}]
        try:
            text = self.render([{"role": USER, "content": parts}])
        except PromptError:
            return False
        return text.count(_PART) == len(parts) and "'text'" not in text and '"text"' not in text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation, up to the answer.

        `tools` are those that may be called, as in OpenAI's API; `variables` are further ones. Raises PromptError if
        the template refuses them.
        """
        values: dict[str, Any] = {"documents": None, **(variables or {}), **self._special_tokens}
        values |= {"messages": [dict(message) for message in messages], "tools": tools and list(tools)}
        values["add_generation_prompt"] = True
        template, _ = self._compiled(bool(tools))
        try:
            return template.render(**values)
        except Exception as error:  # templates raise any type
            described = [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools or ()]
            if described != list(tools or ()):  # some put a description together that may be absent
                return self.render(messages, described, variables)
            has_system = any(message["role"] == SYSTEM for message in messages)
            hint = f"leave the system message out, {_PLAIN}" if has_system else _PLAIN
            raise PromptError(f"the model's chat template refuses this conversation: {error}", hint) from error


def encode_conversation(messages: Sequence[ChatMessage], render: Render, encode: Encode) -> list[int]:
    """Return the token ids of a conversation, up to the next answer.

    An answer with known ids has these: the prompt of a turn begins with the tokens of the turn before, whose keys and
    values are in memory. The text between two such answers is encoded as one. Raises PromptError if the template
    refuses or drops a message.
    """
    salt = secrets.token_hex(8)  # private-use characters and a number that no document knows mark each message's place
    places = {f"\ue000{salt}.{number}\ue001": message for number, message in enumerate(messages)}
    known = [mark for mark, message in places.items() if message.ids is not None and not message.more]

    def rendered(contents: Mapping[str, str]) -> str:
        return render([{"role": each.role, "content": contents[mark], **each.more} for mark, each in places.items()])

    texts = _split(rendered({mark: mark if mark in known else each.content for mark, each in places.items()}), known)
    pattern = render([{**each.more, "role": each.role, "content": mark} for mark, each in places.items()])
    for mark, message in places.items():
        if mark not in pattern and message.content.strip() and "tool_calls" not in message.more:
            what = "an earlier answer" if message.role == ASSISTANT else f"the {message.role} message"
            raise PromptError(f"the model's chat template drops {what}", f"leave it out, {_PLAIN}")
    ids: list[int] = []
    for number, text in enumerate(texts):
        if number:
            ids += places[known[number - 1]].ids or ()
        ids += encode(text, not ids)
    return ids


def _split(text: str, marks: Sequence[str]) -> list[str]:
    """Return the parts of a text around the marks, which must be in it in order. Raises PromptError."""
    parts = []
    for mark in marks:
        part, found, text = text.partition(mark)
        if not found:
            raise PromptError("the model's chat template drops an earlier answer", _PLAIN)
        parts.append(part)
    return [*parts, text]
