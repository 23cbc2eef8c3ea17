"""Installs a model's folder in one step: it is written beside its final place, and renamed when complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import psutil

from ...errors import FetchError


def new_staging(final: Path) -> Path:
    """Make a temporary folder beside `final`, for the caller to remove. Raises FetchError if it cannot be written."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(final.parent)
        return Path(tempfile.mkdtemp(prefix=f".partial-{os.getpid()}-", dir=final.parent))
    except OSError as error:
        raise FetchError(
            f"cannot write to {final.parent}: {error}", "set TRIFORCE_HOME to a writable folder"
        ) from error


def install(ready: Path, final: Path) -> None:
    """Rename a complete folder to `final`. Raises OSError, unless another process has installed the same first."""
    try:
        ready.rename(final)
    except OSError:
        if not final.is_dir():
            raise
    _remove_leftovers(final.parent)  # again: what a killed process had started may have written on


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of processes that no longer run."""
    for leftover in folder.glob(".partial-*"):
        owner = leftover.name.split("-")[1]
        if not owner.isdigit() or not psutil.pid_exists(int(owner)):
            shutil.rmtree(leftover, ignore_errors=True)
