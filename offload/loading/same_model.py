"""Checks that all ranks run the same model with the same settings, before anything is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ..errors import SettingsError
from ..parallel.group import Group
from .formats.safetensors import Checkpoint

_SAMPLE = 2**16  # bytes at the beginning, in the middle and at the end of a file
_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "*.safetensors")


def check_same(group: Group, facts: Mapping[str, Any]) -> None:
    """Raise SettingsError on every rank if a rank's facts differ from rank 0's; values are compared by their repr."""
    gathered = group.collect({name: repr(value) for name, value in facts.items()})
    first = gathered[0]
    for rank, theirs in enumerate(gathered):
        names = [name for name in first | theirs if first.get(name) != theirs.get(name)]
        if names:
            shown = "; ".join(f"{name}: {first.get(name)} and {theirs.get(name)}" for name in names[:4])
            raise SettingsError(
                f"rank 0 and rank {rank} differ in {shown[:500]}",
                "give all nodes the same command, version and model",
            )


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a digest of the model files' names, sizes and samples; reading whole files would take minutes."""
    path = checkpoint.path
    files = [path] if path.is_file() else sorted(file for pattern in _FILES for file in path.glob(pattern))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if len(files) > 1 else ''} {size}".encode())
        with file.open("rb") as stream:
            for start in (0, size // 2, max(size - _SAMPLE, 0)):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()[:16]
