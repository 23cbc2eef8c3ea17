"""The form of an answer, as options, lines of a batch and requests give it -> a constraint. Imports nothing heavy."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.errors import SettingsError
from offload.settings.constraint import CHOICES, GRAMMAR, JSON_SCHEMA, KINDS, QUOTE, Constraint
from offload.short_repr import short_json

FIELDS = {kind.replace("-", "_"): kind for kind in KINDS if kind != QUOTE}  # by their names in lines and parameters


def constraint_of(values: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint among values by name: a schema as text or an object, choices as a list, others as texts.

    None without one. Raises SettingsError for several, and for values of other types.
    """
    given = [name for name in FIELDS if values.get(name) is not None]
    if not given:
        return None
    if len(given) > 1:
        hint = "an answer matches one of them: leave the other out"
        raise SettingsError(f"{given[0]} and {given[1]} contradict each other", hint)
    kind, value = FIELDS[given[0]], values[given[0]]
    if kind == CHOICES or (kind == JSON_SCHEMA and not isinstance(value, str)):
        value = json.dumps(value)
    if not isinstance(value, str):
        raise SettingsError(f"{given[0]} is {short_json(value)}", "give it as a text")
    return Constraint(kind, value)


def constraint_of_flags(params: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint of a command line, whose files are read. Raises SettingsError."""
    values = {name: params.get(name) for name in FIELDS}
    schema = values["json_schema"]
    if schema is not None and schema.strip() not in ("true", "false") and schema.lstrip()[:1] not in ("{", "["):
        values["json_schema"] = _text(schema, JSON_SCHEMA)
    if values["grammar"] is not None:
        values["grammar"] = _text(values["grammar"], GRAMMAR)
    if values["choices"] is not None:
        values["choices"] = [choice.strip() for choice in values["choices"].split(",")]
    return constraint_of(values)


def _text(name: str, kind: str) -> str:
    """Return the text of a file that an option names; - is standard input. Raises SettingsError."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        more = ", or the schema itself, which begins with {" if kind == JSON_SCHEMA else ""
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"--{kind} {name}: {reason}", f"give a file in UTF-8{more}") from None
