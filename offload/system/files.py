"""Atomic writes: a file exists as a whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

TEMPORARY = ".part-"  # prefix of the names of files that are being written
_EXPIRY = 3600  # seconds after which such a file of the user's folders is removed, where no process writes it
_written: set[str] = set()  # the temporary files of this process; of those that are finished, names of nothing


def replace_file(path: Path, *data: bytes | memoryview) -> None:
    """Write `data` to a temporary file readable by its owner only, sync it, and rename it to `path`. Raises OSError."""
    handle, temporary = temporary_for(path)
    try:
        with open(handle, "wb") as file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    finally:
        _written.discard(temporary)


def temporary_for(path: Path) -> tuple[int, str]:
    """Return the descriptor and the name of a new file beside `path`, its owner's only. Raises OSError."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path))
    _written.add(name)
    _lock(handle)
    return handle, name


def remove_temporaries() -> None:
    """Remove the temporary files of this process that exist: it is about to end without unwinding."""
    for name in list(_written):
        try:
            os.unlink(name)
        except OSError:  # renamed, as most are
            pass


def remove_leftovers(path: Path) -> None:
    """Remove what processes that were killed more than an hour ago have left of writing to `path`.

    For files in folders of the user's own: caches sweep theirs.
    """
    for file in path.parent.glob(f"{_prefix(path)}*"):
        try:
            if time.time() - file.stat().st_mtime < _EXPIRY:
                continue
            handle = os.open(file, os.O_RDWR)
            try:
                if _lock(handle):
                    file.unlink()
            finally:
                os.close(handle)
        except OSError:  # another's, or another process was quicker
            continue


def _prefix(path: Path) -> str:
    return f"{TEMPORARY}{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:8]}-"


def _lock(handle: int) -> bool:
    """Lock an open file until its process ends or closes it; return False if another process has."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def sync_folder(path: Path) -> None:
    """Sync a folder, so that its file names survive a crash. Does nothing where the system cannot."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
