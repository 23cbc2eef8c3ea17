"""Renders chat templates exactly as transformers' `apply_chat_template` does, without importing transformers.

A template comes with a checkpoint and is not trusted: it runs in Jinja's sandbox, as in transformers.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Return the text of a template with its variables. Raises whatever the template raises."""
    return _template(source).render(**variables)


@lru_cache(maxsize=1)
def _template(source: str) -> Template:
    return _environment().from_string(source)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return transformers' Jinja environment for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": PlainDict(),
        "namespace": PlainNamespace,
    }
    return environment


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


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON. Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
