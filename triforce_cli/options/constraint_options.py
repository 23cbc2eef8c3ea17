"""What options, lines of a batch and requests want an answer to match -> a constraint. Imports nothing heavy."""

import json
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from offload.errors import SettingsError
from offload.settings.constraint import CHOICES, GRAMMAR, JSON_SCHEMA, KINDS, QUOTE, REGEX, Constraint
from offload.short_repr import short_repr
from offload.system.files import Unbounded, read_bounded

from .settings import refuse_both

_LIMIT = 16 * 2**20  # bytes of a schema or a grammar
FIELDS = {kind.replace("-", "_"): kind for kind in KINDS if kind != QUOTE}  # by their names in lines and parameters


def constraint_of(values: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint among values by name: a schema as text or an object, choices as a list, others as texts.

    None without one. Raises SettingsError for several, and for values of other types.
    """
    given = [name for name in FIELDS if values.get(name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise SettingsError(
            f"{given[0]} and {given[1]} contradict each other", "an answer matches one of them: leave the other out"
        )
    kind, value = FIELDS[given[0]], values[given[0]]
    if kind == CHOICES or (kind == JSON_SCHEMA and not isinstance(value, str)):
        value = json.dumps(value)
    if not isinstance(value, str):
        raise SettingsError(f"{given[0]} is {short_repr(value)}", "give it as a text")
    return Constraint(kind, value)


def constraint_of_flags(params: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint of a command line, whose files are read. Raises SettingsError."""
    for one, other in combinations(FIELDS, 2):
        refuse_both(params, one, other, "an answer matches one of them: leave the other out")
    values: dict[str, Any] = {REGEX: params.get("regex")}
    if (schema := params.get("json_schema")) is not None:
        values["json_schema"] = schema if schema.lstrip()[:1] in ("{", "[") else _text(schema, JSON_SCHEMA)
    if (grammar := params.get("grammar")) is not None:
        values["grammar"] = _text(grammar, GRAMMAR)
    if (choices := params.get("choices")) is not None:
        values["choices"] = [each.strip() for each in choices.split(",")]
    found = constraint_of(values)
    if found is not None and params.get("quote"):
        raise SettingsError(f"--quote and --{found.kind} are both given", "leave one of the two out")
    return found


def _text(name: str, kind: str) -> str:
    """Return the text of a file that an option names. Raises SettingsError."""
    try:
        with Path(name).open("rb", buffering=0) as file:
            text = read_bounded(file, _LIMIT).decode("utf-8-sig")
        if kind == JSON_SCHEMA:
            json.loads(text)
        return text
    except (json.JSONDecodeError, RecursionError) as error:
        raise SettingsError(f"--{kind} {name} is not valid JSON: {error}", "mend the file, or give another") from None
    except (OSError, ValueError, Unbounded) as error:
        reason = getattr(error, "strerror", None) or error
        more = ", or the schema itself, which begins with {" if kind == JSON_SCHEMA else ""
        raise SettingsError(f"--{kind} {name}: {reason}", f"give a file in UTF-8{more}") from None
