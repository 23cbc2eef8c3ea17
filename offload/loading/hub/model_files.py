"""Checks that the files of a model are regular files. Imports nothing heavy."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ...errors import CheckpointError, ModelNotFound

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
                    _check(entry)


def _check(entry: os.DirEntry) -> None:
    try:
        is_regular = stat.S_ISREG(entry.stat().st_mode)
    except OSError as error:  # a link to nowhere or in a circle
        raise CheckpointError(f"{entry.path} cannot be read: {error.strerror}", "fetch the model again") from error
    if not is_regular:
        raise CheckpointError(f"{entry.path} is not a regular file", "fetch the model again")
