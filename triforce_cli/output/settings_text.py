"""The resolved settings as text, for `--verbose`: each as a user writes it, and its origin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from offload.settings.generation import COUPLED, FASTEST
from offload.units import GIB

from .tables import Column, table

_OPTIONS = {"coupled": "sampling"}  # settings whose option has another name
SIZES = ("memory", "host_memory", "disk_limit", "cache_limit")
_ABSENT = {
    **dict.fromkeys(("gamma1", "gamma2", "rebuild_every"), "adaptive"),
    **dict.fromkeys(("memory", "host_memory", "disk_limit"), "what is free"),
    **dict.fromkeys(("resident_layers", "expert_layers"), "as many as fit"),
    "host_share": "balanced",
    "budget": "by the length",
    "cache": "long prompts",
    "tensor_parallel": "the profile's",
}


def settings_lines(settings: Iterable[tuple[str, Any, str]], width: int) -> list[str]:
    """Return a line for each setting: its name, value and origin, in `width` columns."""
    rows = [
        (_OPTIONS.get(name, name.replace("_", "-")), value_text(name, value), origin)
        for name, value, origin in settings
    ]
    columns = (Column("setting"), Column("value", least=8), Column("from", dropped=1))
    return table(columns, rows, width).plain.splitlines()


def value_text(name: str, value: Any) -> str:
    """Return a setting's value as its option takes it: `128K`, `0.3`, `24GB`; a word for what is left open."""
    if value is None or value == ():
        return _ABSENT.get(name, "none")
    if name == "coupled":
        return COUPLED if value else FASTEST
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "threads" and value == 0:
        return "all cores"
    if name in SIZES:
        return size_text(value)
    if name == "context" and value % 1024 == 0:
        return f"{value // 1024}K"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else str(value)


def size_text(size: int) -> str:
    """Return a size as it is usually given: `20GiB`, `24GB`, `1500MB`; bytes if it is not round."""
    for unit, name in ((GIB, "GiB"), (10**9, "GB"), (2**20, "MiB"), (10**6, "MB")):
        if size and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)
