"""Objects of JSON that other programs write: parsed strictly, their values checked by type. Imports nothing heavy."""

import json
from typing import Any

from offload.short_repr import short_json

FieldType = tuple[type | tuple[type, ...], str]  # Python's types of a value, and their name for people

TEXT: FieldType = (str, "a text")
INTEGER: FieldType = (int, "a whole number")
NUMBER: FieldType = ((int, float), "a number")
FLAG: FieldType = (bool, "true or false")
OBJECT: FieldType = (dict, "an object")


def parse_object(data: bytes | str) -> dict[str, Any]:
    """Return the object of a text in UTF-8, whose bytes that are not UTF-8 may be surrogates. Raises ValueError."""
    try:
        text = data if isinstance(data, bytes) else data.encode()
        values = json.loads(text.decode("utf-8-sig"), parse_constant=_refuse_constant)
        # Raises for half a surrogate pair, which no tokenizer encodes, and for 1e400.
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON in UTF-8: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"not a JSON object but {short_json(values)}")
    return values


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def has_type(value: Any, wanted: FieldType) -> bool:
    """Return whether a value is of a type; true and false are no numbers."""
    types = wanted[0] if isinstance(wanted[0], tuple) else (wanted[0],)
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))
