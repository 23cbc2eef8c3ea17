"""Checks that a model's files are regular ones, and installs a folder in one step: written beside it, then renamed."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

import psutil

from ...errors import CheckpointError, FetchError, ModelNotFound


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


_SUFFIXES = (".json", ".safetensors", ".gguf", ".jinja", ".model")
_FOLDERS = (".", "additional_chat_templates")


def check_model_files(path: Path) -> None:
    """Check a model's file, or those in its folder, without opening them. Links to files are followed.

    A pipe would block until somebody writes to it, and a device may have no end. Raises CheckpointError for what is no
    regular file or a broken link, ModelNotFound for a path that is neither a file nor a folder.
    """
    if not path.is_dir():
        if not path.is_file():
            raise ModelNotFound(f"{path} is neither a folder nor a regular file", "give a model's folder or .gguf file")
        return
    for folder in map(path.joinpath, _FOLDERS):
        if not folder.is_dir():
            continue
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIXES):
                    _check_regular(entry)


def _check_regular(entry: os.DirEntry) -> None:
    try:
        is_regular = stat.S_ISREG(entry.stat().st_mode)
    except OSError as error:  # a link to nowhere or in a circle
        raise CheckpointError(f"{entry.path} cannot be read: {error.strerror}", "fetch the model again") from error
    if not is_regular:
        raise CheckpointError(f"{entry.path} is not a regular file", "fetch the model again")
