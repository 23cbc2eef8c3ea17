"""Which methods a benchmark runs. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

from offload.config import Speculation
from offload.errors import SettingsError
from offload.methods import METHODS

BASE = "ar"  # what the others are compared with
DEFAULT = "all that can run"


def parse(names: str) -> tuple[str, ...]:
    """Method names from a list with commas, each once. Raises SettingsError for unknown ones."""
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in METHODS:
            close = get_close_matches(name.lower(), METHODS, 1)
            meant = f"did you mean {close[0]}? " if close else ""
            raise SettingsError(f"there is no method {name!r}", f"{meant}methods: {', '.join(METHODS)}")
    return tuple(dict.fromkeys(wanted))


def speculations(wanted: Sequence[str] | None, settings: Speculation) -> dict[str, Speculation]:
    """The settings of each method, plain decoding first; None stands for all that can run.

    Raises SettingsError for a wanted one that cannot.
    """
    if wanted is None:
        wanted = [name for name in METHODS if not METHODS[name].needs_draft_model or settings.draft_model is not None]
    names = dict.fromkeys([BASE, *wanted])
    return {name: replace(settings, method=name) for name in names}
