"""Files of the user's own that are written whole or not at all, with the permissions that they have or others give."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from offload.files import replace_file


def write_file(path: Path, text: str) -> None:
    """Write a text as UTF-8; the file, or that which a link leads to, is replaced as a whole. Raises OSError."""
    target = target_of(path)
    permissions = permissions_of(target)
    replace_file(target, text.encode())
    os.chmod(target, permissions)


def target_of(path: Path) -> Path:
    """Return the absolute path of a file, or of that which a link leads to, whether it exists or not."""
    return Path(os.path.realpath(path))  # unlike Path.resolve, no error for links that form a circle


def permissions_of(path: Path) -> int:
    """Return the permissions of a file, or those that a new one would get. Temporary files are their owner's alone."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0o666 & ~_umask()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
