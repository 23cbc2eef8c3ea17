"""The methods that `bench` compares, and the lossy modes that it compares with exact decoding. Imports no torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from offload.errors import SettingsError
from offload.hardware.schema import did_you_mean
from offload.settings.config import QUANTIZE, Speculation
from offload.settings.kv_formats import LOSSY_KV
from offload.settings.methods import APPROXIMATIONS, METHODS, MIDDLES
from offload.settings.parse import parse_assignment

from ..options.settings import Settings, resolve_with

BASE = "ar"  # what the methods are compared with
_OWN = ("draft", "middle", "tree", "tree_sampling", "budget", "chunk", "gamma1", "gamma2", "sink", "window")


def parse_methods(text: str) -> tuple[str, ...]:
    """Return the methods in a list with commas, each once. Raises SettingsError for unknown ones.

    A method is a name, with settings for it alone behind it: `retrieval:budget=1024`, `naive:draft=lookup:tree=16`.
    """
    names = tuple(dict.fromkeys(each.strip() for each in text.split(",")))
    for each in names:
        name, own = _split(each)
        if name not in METHODS:
            raise SettingsError(
                f"there is no method {name!r}", f"{did_you_mean(name, METHODS)}methods: {', '.join(METHODS)}"
            )
        if others := sorted(set(own) - set(_OWN)):
            raise SettingsError(f"{each}: {others[0]} cannot be its own setting", f"use {', '.join(_OWN)}")
        if "middle" in own and (own["middle"] not in MIDDLES or METHODS[name].middle is None):
            hint = f"use one of: {', '.join(MIDDLES)}; with a method that has a middle level, such as retrieval"
            raise SettingsError(f"{each}: {own['middle']!r} cannot be its middle level", hint)
    return names


def name_of(method: str) -> str:
    """Return the name in METHODS of what `parse_methods` returns."""
    return _split(method)[0]


def _split(method: str) -> tuple[str, dict[str, Any]]:
    name, *own = re.split(r":(?=\w+=)", method)  # a tree's shape has colons too
    return name, dict(map(parse_assignment, own))


def speculations(methods: Sequence[str] | None, settings: Speculation) -> dict[str, Speculation]:
    """Return the settings of each method, plain decoding first; None stands for all that can run."""
    if methods is None:
        methods = [name for name in METHODS if not METHODS[name].needs_draft_model or settings.draft_model is not None]
    found = {}
    for method in dict.fromkeys([BASE, *methods]):
        name, own = _split(method)
        found[method] = replace(settings, method=name, **own)
    return found


EXACT = "exact"  # the model as it is
# The settings of each mode of --quality, over those of the command line.
MODES: dict[str, Mapping[str, Any]] = {
    EXACT: {},
    **{name: {"approximate": name} for name in APPROXIMATIONS},
    **{f"kv={kind}": {"kv": kind} for kind in LOSSY_KV},
    **{f"quantize={level}": {"quantize": level} for level in reversed(QUANTIZE)},
}
_DECIDED = {name for values in MODES.values() for name in values}  # by the modes


def parse_modes(text: str) -> tuple[str, ...]:
    """Return the modes in a list with commas, each once, the exact one first. Raises SettingsError for unknown ones."""
    names = [each.strip() for each in text.split(",")]
    for name in names:
        if name not in MODES:
            hint = f"{did_you_mean(name, MODES)}modes: {', '.join(MODES)}"
            raise SettingsError(f"there is no mode {name!r}", hint)
    return tuple(dict.fromkeys((EXACT, *names)))


def settings_of(mode: str, given: Settings) -> Settings:
    """Return the given settings in a mode. Raises SettingsError if they contradict it."""
    kept = {name: value for name, value in given.values.items() if name not in _DECIDED}
    return resolve_with(kept | dict(MODES[mode]), given.origins, given.profile, chosen_by_name=False)
