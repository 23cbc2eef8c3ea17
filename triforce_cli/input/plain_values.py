"""Builds the values of a file of YAML or JSON, with strict types: dataclasses from mappings. Imports no torch."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin

from offload.errors import SettingsError
from offload.hardware.schema import InvalidValue, Key, dotted, refuse_unknown, type_hints
from offload.short_repr import short_repr

_EXAMPLES = "files of `triforce chat` are written by its /save"
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "keys and values"}


def build(kind: Any, value: Any, key: Key = ()) -> Any:
    """Build a value of a type hint from plain values: dataclasses from mappings, tuples from lists, all else as it is.

    Raises InvalidValue with the path of the value that is wrong.
    """
    options = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    if value is None and type(None) in options:
        return None
    kind = options[0]
    if is_dataclass(kind):
        return _built(kind, value, key)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise _wrong(key, value, "a list")
        return tuple(build(get_args(kind)[0], each, (*key, str(number))) for number, each in enumerate(value, 1))
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise _wrong(key, value, _WORDS[kind])
    return value


def _built(kind: Any, value: Any, key: Key) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(key, value, "keys and values")
    hints = type_hints(kind)
    refuse_unknown(value, list(hints), key)
    required = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
    if missing := [dotted((*key, name)) for name in required if name not in value]:
        raise InvalidValue(key, f"{', '.join(missing)} missing", _EXAMPLES)
    given = {name: build(hints[name], each, (*key, name)) for name, each in value.items()}
    try:
        return kind(**given)
    except InvalidValue as error:
        message = f"{dotted(key)}: {error.message}" if key else error.message
        raise InvalidValue((*key, *error.key), message, error.hint) from error
    except SettingsError as error:
        raise InvalidValue(key, f"{dotted(key)}: {error.message}", error.hint) from error


def _wrong(key: Key, value: Any, wanted: str) -> InvalidValue:
    return InvalidValue(key, f"{dotted(key) or 'the file'} is {short_repr(value)}, not {wanted}", _EXAMPLES)
