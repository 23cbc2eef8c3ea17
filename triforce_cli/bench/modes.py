"""The modes whose answers are compared with the exact one. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.errors import SettingsError
from offload.hardware.schema import did_you_mean
from offload.settings.config import QUANTIZE
from offload.settings.kv_formats import LOSSY_KV
from offload.settings.methods import APPROXIMATIONS

from ..options.settings import Settings, resolve_with

EXACT = "exact"  # the model as it is: what the others are compared with
DENSE = "dense"  # all tokens, also of a text beyond the model's context, which is not extended: a baseline
RECOMPUTE = "recompute"  # the latest `budget` tokens run anew for each token: a baseline, and no way to decode
DEFAULT = "all that can run"
# The settings of each mode, over those of the command line. A new mode is a line here.
MODES: dict[str, Mapping[str, Any]] = {
    EXACT: {},
    **{name: {"approximate": name} for name in APPROXIMATIONS},
    **{f"kv={kind}": {"kv": kind} for kind in LOSSY_KV},
    **{f"quantize={level}": {"quantize": level} for level in reversed(QUANTIZE)},
}

NAMES = (*MODES, DENSE, RECOMPUTE)
CHANGED = frozenset(name for values in MODES.values() for name in values)  # settings that the modes decide


def parse(names: str) -> tuple[str, ...]:
    """Return the modes in a list with commas, each once, the exact one first. Raises SettingsError for unknown ones.

    A mode is one of NAMES, or several of them joined by +, which change different things.
    """
    parsed = [name.strip() for name in names.split(",")]
    for name in (part for each in parsed for part in each.split("+")):
        if name not in NAMES:
            hint = f"{did_you_mean(name, NAMES)}modes: {', '.join(NAMES)}"
            raise SettingsError(f"there is no mode {name!r}", hint)
    for name in parsed:
        _check_parts(name)
    return tuple(dict.fromkeys((EXACT, *parsed)))


def _check_parts(mode: str) -> None:
    """Raise SettingsError for a mode whose parts change the same thing, of which one would not apply."""
    parts = list(dict.fromkeys(mode.split("+")))
    caches = [part for part in parts if part in (DENSE, RECOMPUTE) or "approximate" in MODES[part]]
    others = [[part for part in parts if name in MODES.get(part, {})] for name in ("kv", "quantize")]
    for same in (caches, *others):
        if len(same) > 1:
            raise SettingsError(f"{mode}: {same[0]} and {same[1]} exclude each other", "give each as a mode of its own")


def recomputes(mode: str) -> bool:
    """Return whether a mode of what `parse` returns runs a window anew for each token."""
    return RECOMPUTE in mode.split("+")


def is_dense(mode: str) -> bool:
    """Return whether a mode of what `parse` returns attends to all tokens of a text of any length."""
    return DENSE in mode.split("+")


def values_of(mode: str) -> dict[str, Any]:
    """Return the settings that make a mode of what `parse` returns."""
    return {name: value for part in mode.split("+") for name, value in MODES.get(part, {}).items()}


def settings_of(mode: str, given: Settings) -> Settings:
    """Return the given settings in a mode. Raises SettingsError if they contradict it."""
    clean = {name: value for name, value in given.values.items() if name not in CHANGED}
    return resolve_with(clean | values_of(mode), given.origins, given.profile, chosen_by_name=False)
