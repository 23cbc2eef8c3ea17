"""The methods that a benchmark compares. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

from offload.config import Speculation
from offload.errors import SettingsError
from offload.methods import METHODS

BASE = "ar"  # the baseline
DEFAULT = "all that can run"


def parse(names: str) -> tuple[str, ...]:
    """Return the method names in a list with commas, each once. Raises SettingsError for unknown ones."""
    parsed = [name.strip() for name in names.split(",")]
    for name in parsed:
        if name not in METHODS:
            close = get_close_matches(name.lower(), METHODS, 1)
            meant = f"did you mean {close[0]}? " if close else ""
            raise SettingsError(f"there is no method {name!r}", f"{meant}methods: {', '.join(METHODS)}")
    return tuple(dict.fromkeys(parsed))


def speculations(methods: Sequence[str] | None, settings: Speculation) -> dict[str, Speculation]:
    """Return the settings of each method, plain decoding first; None stands for all that can run.

    Raises SettingsError for a method that cannot run.
    """
    if methods is None:
        methods = [name for name in METHODS if not METHODS[name].needs_draft_model or settings.draft_model is not None]
    names = dict.fromkeys([BASE, *methods])
    return {name: replace(settings, method=name) for name in names}
