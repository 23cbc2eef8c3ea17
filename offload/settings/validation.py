"""Checks of settings: each raises SettingsError with a hint."""

from collections.abc import Collection
from dataclasses import fields
from numbers import Integral, Real
from os import PathLike
from types import NoneType
from typing import Any

from ..errors import SettingsError
from ..short_repr import short_repr
from ..units import MOST_TOKENS

# What the annotations of settings admit, numpy's numbers included, and what to use, in words.
_KINDS: dict[str, tuple[type, str]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "str": (str, "a string"),
    "bool": (bool, "True or False"),
    "tuple[str, ...]": (tuple, "a tuple of strings"),
    "Path": (PathLike, "a pathlib.Path"),
    "Constraint": (object, "an offload.Constraint"),  # checked apart: its module imports this one
    "None": (NoneType, "None"),
}


def require(condition: bool, message: str, hint: str) -> None:
    """Raise SettingsError unless the condition holds."""
    if not condition:
        raise SettingsError(message, hint)


def require_between(name: str, value: float | None, least: float, most: float, hint: str) -> None:
    """Raise SettingsError for a number outside of these limits, which are allowed; accept None."""
    require(value is None or least <= value <= most, f"{name} is {short_repr(value)}", hint)


def require_tokens(name: str, value: int | None, least: int, hint: str) -> None:
    """Raise SettingsError for a number of tokens below `least` or above the longest context; accept None."""
    require_between(name, value, least, MOST_TOKENS, hint)


def require_one_of(name: str, value: str | None, allowed: Collection[str], more: str = "") -> None:
    """Raise SettingsError for a value that is none of the allowed ones; its hint lists them, and ends with `more`."""
    require(value in allowed, f"{name} is {short_repr(value)}", f"use one of: {', '.join(allowed)}{more}")


def require_types(settings: Any) -> None:
    """Raise SettingsError if a field of a settings dataclass has another type than its annotation says."""
    for field in fields(settings):
        value, kinds = getattr(settings, field.name), str(field.type).split(" | ")
        if not any(_is_of(value, kind) for kind in kinds):
            name = field.name.replace("_", "-")
            hint = f"use {' or '.join(_KINDS[kind][1] for kind in kinds)}"
            raise SettingsError(f"{name} is {short_repr(value)}, of type {type(value).__name__}", hint)


def _is_of(value: object, kind: str) -> bool:
    accepted = _KINDS[kind][0]
    if isinstance(value, bool):
        return accepted is bool
    if isinstance(value, tuple) and not all(isinstance(text, str) for text in value):
        return False
    return isinstance(value, accepted)


def require_instance(name: str, value: object, kind: type) -> None:
    """Raise SettingsError unless an argument is of the settings class that it should be."""
    hint = f"give an offload.{kind.__name__}, such as {kind.__name__}()"
    require(isinstance(value, kind), f"{name} is {short_repr(value)}, of type {type(value).__name__}", hint)
