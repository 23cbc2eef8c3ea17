"""Chat templates, rendered as transformers does without importing it, and the token ids of conversations.

A template comes with a checkpoint and is not trusted: it runs in Jinja's sandbox, as in transformers.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...errors import PromptError

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
_SWITCH = "enable_thinking"  # the variable of a template
_HINT = "leave the system message out, use --raw to go without the template, or use another model"

# A text, whether control tokens that are spelt out in it are text, and whether it begins the prompt.
Encode = Callable[[str, bool, bool], list[int]]
Render = Callable[[Sequence[Mapping[str, Any]]], str]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation. `ids` are the tokens of an assistant's, if they are known.

    `more` are further values for the template: an assistant's calls of tools, or which call a tool's message answers.
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
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(source)


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

    @property
    def has_switch(self) -> bool:
        """Return whether thinking can be switched on and off, as by the templates of Qwen3 and SmolLM3."""
        return _SWITCH in self.text()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        think: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the text of a conversation, up to the answer. `think` is the switch's value; None: its default.

        `tools` are those that may be called, as in OpenAI's API. Raises PromptError if the template refuses them.
        """
        values: dict[str, Any] = {"messages": [dict(message) for message in messages], "tools": tools and list(tools)}
        values |= {"documents": None, "add_generation_prompt": True} | self._special_tokens
        try:
            return _compiled(self.text(bool(tools))).render(**values, **({} if think is None else {_SWITCH: think}))
        except Exception as error:  # templates raise any type
            raise PromptError(f"the model's chat template refuses this conversation: {error}", _HINT) from error


def encode_conversation(
    messages: Sequence[ChatMessage], render: Render, encode: Encode, control_tokens: Sequence[str]
) -> list[int]:
    """Return the token ids of a conversation, up to the next answer.

    An answer with known ids has these: the prompt of a turn begins with the tokens of the turn before, whose keys and
    values are in memory. The text between two such answers is rendered by the template and encoded as one text. Where a
    message in it spells out one of the `control_tokens`, messages are encoded apart, as plain text, so that a document
    cannot act as another role. Raises PromptError if the template refuses or drops a message.
    """
    if any(token in json.dumps(each.more, ensure_ascii=False) for token in control_tokens for each in messages):
        raise PromptError("a call of a tool spells out a control token", "leave it out")
    salt = secrets.token_hex(8)  # private-use characters and a number that no document knows mark each message's place
    places = {f"\ue000{salt}.{number}\ue001": message for number, message in enumerate(messages)}
    known = [mark for mark, message in places.items() if message.ids is not None and not message.more]

    def rendered(contents: Mapping[str, str]) -> list[str]:
        fields = [{"role": each.role, "content": contents[mark], **each.more} for mark, each in places.items()]
        return _split(render(fields), known)

    texts = rendered({mark: mark if mark in known else each.content for mark, each in places.items()})
    patterns = rendered({mark: mark for mark in places})
    for mark, message in places.items():
        if mark not in known and not message.more and not any(mark in pattern for pattern in patterns):
            what = "an earlier answer" if message.role == ASSISTANT else f"the {message.role} message"
            raise PromptError(f"the model's chat template drops {what}", _HINT)
    ids: list[int] = []
    for number, (text, pattern) in enumerate(zip(texts, patterns, strict=True)):
        if number:
            ids += places[known[number - 1]].ids or ()
        present = {mark: message.content for mark, message in places.items() if mark in pattern}
        if not any(token in content for token in control_tokens for content in present.values()):
            ids += encode(text, False, not ids)
            continue
        for part in re.split("(" + "|".join(map(re.escape, present)) + ")", pattern):
            ids += encode(present.get(part, part), part in present, not ids)
    return ids


def _split(text: str, marks: Sequence[str]) -> list[str]:
    """Return the parts of a text around the marks, which must be in it in order. Raises PromptError."""
    parts = []
    for mark in marks:
        part, found, text = text.partition(mark)
        if not found:
            raise PromptError("the model's chat template drops an earlier answer", _HINT)
        parts.append(part)
    return [*parts, text]
