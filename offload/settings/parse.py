"""Values of settings as people write them, in options, environment variables and config.yaml. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from ..errors import SettingsError
from ..short_repr import short_repr
from ..units import parse_size
from .config import GROUPS

SIZES = ("memory", "host_memory", "disk_limit", "cache_limit")  # in bytes, written like 22GiB
_FIELDS = {field.name: field for group in GROUPS for field in fields(group) if field.name != "constraint"}
NAMES = tuple(_FIELDS)  # of all settings that have one value
DEFAULTS: dict[str, Any] = {name: field.default for name, field in _FIELDS.items()}
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def parse_setting(name: str, text: Any) -> Any:
    """Return the value of the setting `name` from its text, by the type of its field; other values as they are.

    Raises SettingsError for a text of another type. Limits are checked by the dataclasses themselves.
    """
    if not isinstance(text, str):
        return text
    shown, kind = name.replace("_", "-"), str(_FIELDS[name].type).split(" | ")[0]
    try:
        if name in SIZES:
            return parse_size(text)
        if kind == "int":
            return int(text.replace("_", ""))
        if kind == "float":
            return float(text)
        if kind == "bool":
            return _BOOLEANS[text.strip().lower()]
        return text
    except SettingsError as error:
        raise SettingsError(f"{shown}: {error.message}", error.hint) from None
    except (ValueError, KeyError):
        wanted = {"int": "a whole number, such as 8", "float": "a number, such as 0.5"}.get(kind, "true or false")
        raise SettingsError(f"{shown} is {short_repr(text)}", f"use {wanted}") from None


def parse_assignment(text: str) -> tuple[str, Any]:
    """Return the name and the value of a setting written as NAME=VALUE. Raises SettingsError."""
    written, equals, value = text.partition("=")
    name = written.strip().replace("-", "_")
    if not equals:
        raise SettingsError(f"{short_repr(text)} gives no value", "write NAME=VALUE, such as chunk=16")
    if name not in NAMES or name == "stop":
        close = "".join(f"did you mean {known}? " for known in get_close_matches(name, NAMES, 1))
        raise SettingsError(f"there is no setting {short_repr(written.strip())}", f"{close}docs/options.md lists all")
    return name, parse_setting(name, value)
