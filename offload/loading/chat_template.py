"""Renders chat templates exactly as transformers' `apply_chat_template` does, without importing transformers.

Templates are untrusted code from a checkpoint: they run in Jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

Message = Mapping[str, str]
_SWITCH = "enable_thinking"  # the variable of a template


class ChatTemplate:
    """A model's chat template.

    Args:
        source: a Jinja template, or several by name, of which "default" is used.
        special_tokens: variables of the template, such as `bos_token`.
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    @property
    def text(self) -> str:
        """The template itself; empty if there are several and none is the default."""
        return self._source if isinstance(self._source, str) else self._source.get("default", "")

    @property
    def has_switch(self) -> bool:
        """Return whether thinking can be switched on and off, as by the templates of Qwen3 and SmolLM3."""
        return _SWITCH in self.text

    def render(self, messages: Sequence[Message], think: bool | None = None) -> str:
        """Return the text of a conversation, up to the answer. `think` is the switch's value; None: its default.

        Raises whatever the template raises, jinja2.TemplateError for a broken template, ValueError if there are
        several templates and none is the default.
        """
        return self._template.render(
            **{"messages": [dict(message) for message in messages], "tools": None, "documents": None}
            | {"add_generation_prompt": True}
            | ({} if think is None else {_SWITCH: think})
            | self._special_tokens
        )

    @cached_property
    def _template(self) -> Any:
        source = self._source
        if not isinstance(source, str):
            if "default" not in source:
                raise ValueError(f"there are several chat templates and no default: {', '.join(sorted(source))}")
            source = source["default"]
        return _environment().from_string(source)


def _environment() -> Any:
    """Return transformers' Jinja environment for chat templates."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class GenerationTag(Extension):
        """{% generation %} marks the assistant's text for training; when rendering, its body is used as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> str:
            return caller()

    class PlainDict:
        """`dict` without the attributes through which a template could reach Python's internals."""

        def __call__(self, *args: Any, **values: Any) -> dict:
            return dict(*args, **values)

        def fromkeys(self, *args: Any) -> dict:
            return dict.fromkeys(*args)

    class PlainNamespace(Namespace):
        """Jinja's namespace, without underscore-prefixed attributes."""

        def __init__(*args: Any, **values: Any) -> None:  # no `self`: it may be one of the values, as in Jinja's own
            self, args = args[0], args[1:]
            values = dict(*args, **values)
            for name in values:
                PlainNamespace.check_name(name)
            Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            PlainNamespace.check_name(name)
            Namespace.__setitem__(self, name, value)

        @staticmethod
        def check_name(name: Any) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise SecurityError(f"chat templates cannot store underscore-prefixed attributes, but got {name!r}")

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": PlainDict(),
        "namespace": PlainNamespace,
    }
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON. Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
