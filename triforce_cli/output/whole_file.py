"""Files of the user's own that are written whole or not at all, with the permissions that they have or others give."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from offload.errors import SettingsError
from offload.system.files import remove_leftovers, replace_file, temporary_for


def check_file(path: Path, option: str, example: str) -> None:
    """Raise SettingsError if no file could be written there, or where a link leads."""
    folder = target_of(path).parent
    if not folder.is_dir():
        raise SettingsError(f"there is no folder {folder}", f"create it, or choose another file for {option}")
    if path.is_dir():
        raise SettingsError(f"{path} is a folder", f"give {option} a file, such as {example}")
    if path.exists() and not path.is_file():
        raise SettingsError(f"{path} is no regular file", f"give {option} a file, such as {example}")
    if not os.access(folder, os.W_OK):
        raise SettingsError(f"{folder} is not writable", f"choose another folder for {option}")


def write_file(path: Path, text: str) -> None:
    """Write a text as UTF-8; the file, or that which a link leads to, is replaced as a whole. Raises OSError."""
    target = target_of(path)
    permissions = permissions_of(target)
    remove_leftovers(target)
    replace_file(target, text.encode())
    os.chmod(target, permissions)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[str]]:
    """Open a file for text that replaces it at the end, with what there is then; not after an error without any text.

    What is no regular file, such as /dev/null, is written to as it is. Raises OSError.
    """
    target = target_of(path)
    if target.exists() and not target.is_file():
        with target.open("w", encoding="utf-8") as file:
            yield file
        return
    remove_leftovers(target)
    handle, name = temporary_for(target)
    is_complete = False
    try:
        with open(handle, "w", encoding="utf-8") as file:
            try:
                yield file
                is_complete = True
            finally:
                file.flush()
                os.fsync(file.fileno())
    finally:
        if is_complete or os.path.getsize(name):  # after an error or Ctrl-C: hours of work may be in it
            os.chmod(name, permissions_of(target))
            os.replace(name, target)
        else:
            os.unlink(name)


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
