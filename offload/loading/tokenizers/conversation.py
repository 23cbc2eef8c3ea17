"""The token ids of a conversation: each answer as the model wrote it, and everything else as the chat template has it.

So the prompt of a turn begins with the tokens of the turn before, whose keys and values are in memory. Encoding the
rendered text as a whole would not do: a tokenizer may cut an answer's text in other places than the model did.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import PromptError
from ...short_repr import short_text
from .template_rendering import render

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"

Encode = Callable[[str, bool], list[int]]  # a text, and whether control tokens that are spelt out in it are text
Render = Callable[[Sequence[dict[str, Any]]], str]
_SALT = re.compile("\ue000([0-9]+)\\.")
_OTHER_MODEL = "use --model with another model"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation. `ids` are the tokens of an assistant's, if they are known.

    `more` are further values for the template: an assistant's calls of tools, or which call a tool's message answers.
    """

    role: str
    content: str
    ids: tuple[int, ...] | None = None
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)


def encode_conversation(
    messages: Sequence[ChatMessage], render: Render, encode: Encode, control_tokens: Sequence[str]
) -> list[int]:
    """Return the token ids of a conversation, up to the next answer.

    An answer has its own `ids`, else those of its text. What stands between two answers is rendered by the template and
    encoded as one text. Where a message in it spells out one of the `control_tokens`, messages are encoded apart, as
    plain text, so that a document cannot act as another role. Raises PromptError if the template refuses the messages
    or drops one.
    """
    contents = dict(zip(_marks(messages), messages, strict=True))
    answers = {mark: each for mark, each in contents.items() if each.role == ASSISTANT and not each.more}
    if any(token in json.dumps(each.more, ensure_ascii=False) for token in control_tokens for each in messages):
        raise PromptError("a call of a tool spells out a control token", "leave it out")
    texts = _split(_render([mark if mark in answers else None for mark in contents], messages, render), answers)
    patterns = _split(_render(list(contents), messages, render), answers)
    _check_none_dropped(contents, patterns)
    ids: list[int] = []
    for answer, text, pattern in zip([None, *answers.values()], texts, patterns, strict=True):
        if answer is not None:
            ids += encode(answer.content, True) if answer.ids is None else answer.ids
        ids += _between_answers(text, pattern, contents, encode, control_tokens)
    return ids


def _between_answers(
    text: str, pattern: str, contents: Mapping[str, ChatMessage], encode: Encode, control_tokens: Sequence[str]
) -> list[int]:
    """Return the ids of a `text` between two answers; `pattern` is the same text with marks in place of messages."""
    present = {mark: each.content for mark, each in contents.items() if mark in pattern}
    if not any(token in content for token in control_tokens for content in present.values()):
        return encode(text, False)
    parts = re.split("(" + "|".join(map(re.escape, present)) + ")", pattern)
    return [token for part in parts for token in encode(present.get(part, part), part in present)]


def _marks(messages: Sequence[ChatMessage]) -> list[str]:
    """Return a placeholder for each message, of private-use characters, that occurs in none of them."""
    spelt = {salt for each in messages for salt in _SALT.findall(each.content)}  # one pass: a document may spell many
    salt = next(number for number in itertools.count() if str(number) not in spelt)
    return [f"\ue000{salt}.{number}\ue001" for number in range(len(messages))]


def _render(contents: Sequence[str | None], messages: Sequence[ChatMessage], render: Render) -> str:
    """Return the template's text of the messages, with other contents where they are given. Raises PromptError."""
    pairs = zip(contents, messages, strict=True)
    shown = [
        {"role": each.role, "content": each.content if other is None else other, **each.more} for other, each in pairs
    ]
    try:
        return render(shown)
    except Exception as error:  # templates raise any type
        has_system = any(each.role == SYSTEM for each in messages)
        hint = "leave the system message out" if has_system else _OTHER_MODEL
        raise PromptError(
            f"the model's chat template refuses this conversation: {short_text(str(error))}", hint
        ) from error


def _split(text: str, marks: Iterable[str]) -> list[str]:
    """Return the parts of a text around the marks, which must be in it in order. Raises PromptError."""
    parts = []
    for mark in marks:
        part, found, text = text.partition(mark)
        if not found:
            raise PromptError("the model's chat template drops an earlier answer", _OTHER_MODEL)
        parts.append(part)
    return [*parts, text]


def _check_none_dropped(contents: Mapping[str, ChatMessage], patterns: Sequence[str]) -> None:
    for mark, each in contents.items():
        if each.role != ASSISTANT and not any(mark in pattern for pattern in patterns):
            raise PromptError(f"the model's chat template drops the {each.role} message", _OTHER_MODEL)


Message = Mapping[str, Any]
_SWITCH = "enable_thinking"  # the variable of a template
_DEFAULT, _TOOL_USE = "default", "tool_use"  # transformers' names of templates


class ChatTemplate:
    """A model's chat template.

    Args:
        source: a Jinja template, or several by name, of which "tool_use" is used with tools, and "default" else.
        special_tokens: variables of the template, such as `bos_token`.
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    @property
    def text(self) -> str:
        """The template itself, without tools; empty if there are several and none is the default."""
        return self.text_of(with_tools=False)

    def text_of(self, with_tools: bool) -> str:
        """Return the template for prompts with tools, or without; empty if there is none."""
        if isinstance(self._source, str):
            return self._source
        return (with_tools and self._source.get(_TOOL_USE)) or self._source.get(_DEFAULT, "")

    @property
    def has_switch(self) -> bool:
        """Return whether thinking can be switched on and off, as by the templates of Qwen3 and SmolLM3."""
        return _SWITCH in self.text

    def render(
        self,
        messages: Sequence[Message],
        think: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the text of a conversation, up to the answer. `think` is the switch's value; None: its default.

        `tools` are those that may be called, as in OpenAI's API.

        Raises what the template raises, and ValueError if there are several templates and none is the default.
        """
        variables = (
            {"messages": [dict(message) for message in messages], "tools": tools and list(tools), "documents": None}
            | {"add_generation_prompt": True}
            | ({} if think is None else {_SWITCH: think})
            | self._special_tokens
        )
        return render(self._chosen(bool(tools)), variables)

    def _chosen(self, with_tools: bool) -> str:
        if not (text := self.text_of(with_tools)):
            raise ValueError(f"there are several chat templates and no default: {', '.join(sorted(self._source))}")
        return text
