"""Do all ranks mean the same thing? Asked once, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SettingsError
from .group import Group


def check_same(group: Group, facts: Mapping[str, Any]) -> None:
    """Raises SettingsError, on every rank, with the names of what differs from rank 0's; values must be printable."""
    everyone = group.collect({name: repr(value) for name, value in facts.items()})
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        names = [name for name in first | theirs if first.get(name) != theirs.get(name)]
        if names:
            shown = "; ".join(f"{name}: {first.get(name)} and {theirs.get(name)}" for name in names[:4])
            raise SettingsError(
                f"rank 0 and rank {rank} differ in {shown[:500]}",
                "give all nodes the same command, version and model",
            )
