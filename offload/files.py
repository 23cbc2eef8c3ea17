"""Files that are there as a whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

TEMPORARY = ".part-"  # how names of files that are being written begin


def replace_file(path: Path, *data: bytes) -> None:
    """Write `data` to `path`, readable by its owner alone: to a temporary name, synced, renamed. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY)  # mkstemp's files are their owner's
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
    """Make the names in a folder last, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
