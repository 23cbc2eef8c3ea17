"""The modes whose answers are compared with the exact one. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from offload.config import QUANTIZE
from offload.errors import SettingsError
from offload.methods import APPROXIMATIONS

from ...options.settings import Settings, resolve_with

EXACT = "exact"  # the model as it is: what the others are compared with
DEFAULT = "all that can run"
# The settings of each mode, over those of the command line. A new mode is a line here.
MODES: dict[str, Mapping[str, Any]] = {
    EXACT: {},
    **{name: {"approximate": name} for name in APPROXIMATIONS},
    **{f"quantize={level}": {"quantize": level} for level in reversed(QUANTIZE)},
}

CHANGED = frozenset(name for values in MODES.values() for name in values)  # settings that the modes decide


def parse(names: str) -> tuple[str, ...]:
    """Return the modes in a list with commas, each once, the exact one first. Raises SettingsError for unknown ones.

    A mode is a name of MODES, or several of them joined by +.
    """
    parsed = [name.strip() for name in names.split(",")]
    for name in (part for each in parsed for part in each.split("+")):
        if name not in MODES:
            close = get_close_matches(name.lower(), MODES, 1)
            meant = f"did you mean {close[0]}? " if close else ""
            raise SettingsError(f"there is no mode {name!r}", f"{meant}modes: {', '.join(MODES)}")
    return tuple(dict.fromkeys((EXACT, *parsed)))


def values_of(mode: str) -> dict[str, Any]:
    """Return the settings that make a mode of what `parse` returns."""
    return {name: value for part in mode.split("+") for name, value in MODES[part].items()}


def settings_of(mode: str, given: Settings) -> Settings:
    """Return the given settings in a mode. Raises SettingsError if they contradict it."""
    clean = {name: value for name, value in given.values.items() if name not in CHANGED}
    return resolve_with(clean | values_of(mode), given.origins, given.profile, chosen_by_name=False)
