"""The option --parallel: how many sequences run together. Imports no torch."""

from __future__ import annotations

import re

from offload.errors import SettingsError
from offload.short_repr import short_repr

AUTO = "auto"
LARGEST = 1024


def parse_parallel(text: str | int) -> int | str:
    """Return a number of sequences, or "auto". Raises SettingsError."""
    given = str(text).strip().lower()
    if given == AUTO:
        return AUTO
    if not re.fullmatch("[0-9]{1,4}", given) or not 1 <= int(given) <= LARGEST:
        hint = f"give a number of sequences from 1 to {LARGEST:,}, or auto"
        raise SettingsError(f"--parallel is {short_repr(text)}", hint)
    return int(given)
