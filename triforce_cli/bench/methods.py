"""The methods that a benchmark compares. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

from offload.config import DRAFTS, Speculation
from offload.errors import SettingsError
from offload.methods import METHODS

BASE = "ar"  # the baseline
DEFAULT = "all that can run"


def parse(names: str) -> tuple[str, ...]:
    """Return the methods in a list with commas, each once. Raises SettingsError for unknown ones.

    A method is a name, or a name and a value of --draft for it alone, such as `retrieval:self` or `triforce:none`.
    """
    parsed = [name.strip() for name in names.split(",")]
    for each in parsed:
        name, has_draft, draft = each.partition(":")
        if name not in METHODS:
            close = get_close_matches(name.lower(), METHODS, 1)
            meant = f"did you mean {close[0]}? " if close else ""
            raise SettingsError(f"there is no method {name!r}", f"{meant}methods: {', '.join(METHODS)}")
        if has_draft and draft not in DRAFTS:
            raise SettingsError(f"{each}: {draft!r} cannot be its drafter here", f"use one of: {', '.join(DRAFTS)}")
    return tuple(dict.fromkeys(parsed))


def name_of(method: str) -> str:
    """Return the name of a method in the table METHODS, of what `parse` returns."""
    return method.partition(":")[0]


def speculations(methods: Sequence[str] | None, settings: Speculation) -> dict[str, Speculation]:
    """Return the settings of each method, plain decoding first; None stands for all that can run.

    Raises SettingsError for a method that cannot run.
    """
    if methods is None:
        methods = [name for name in METHODS if not METHODS[name].needs_draft_model or settings.draft_model is not None]
    return {each: _speculation(each, settings) for each in dict.fromkeys([BASE, *methods])}


def _speculation(method: str, settings: Speculation) -> Speculation:
    name, _, draft = method.partition(":")
    return replace(settings, method=name, draft=draft or settings.draft)
