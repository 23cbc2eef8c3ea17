"""Atomic writes: a file exists as a whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

TEMPORARY = ".part-"  # prefix of the names of files that are being written


def replace_file(path: Path, *data: bytes) -> None:
    """Write `data` to a temporary file readable by its owner only, sync it, and rename it to `path`. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY)  # the owner's only
    try:
        with open(handle, "wb") as file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Sync a folder, so that its file names survive a crash. Does nothing where the system cannot."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
