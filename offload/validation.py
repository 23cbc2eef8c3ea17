"""Checks of settings: each raises SettingsError with a hint."""

from __future__ import annotations

from .errors import SettingsError
from .short_repr import short_repr
from .units import MOST_TOKENS


def require(condition: bool, message: str, hint: str) -> None:
    """Raise SettingsError unless the condition holds."""
    if not condition:
        raise SettingsError(message, hint)


def require_tokens(name: str, value: int | None, least: int, hint: str) -> None:
    """Raise SettingsError for a number of tokens below `least` or above the longest context; accept None."""
    require(value is None or least <= value <= MOST_TOKENS, f"{name} is {short_repr(value)}", hint)
