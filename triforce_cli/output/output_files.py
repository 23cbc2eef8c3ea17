"""The user's files, written whole or not at all; permissions stay as they are."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from offload.errors import SettingsError, TriforceError
from offload.system.files import temporary_for


def check_file(path: Path, option: str, example: str) -> None:
    """Raise SettingsError if no file could be written there, or where a link leads."""
    folder = target_of(path).parent
    if not folder.is_dir():
        raise SettingsError(f"there is no folder {folder}", f"create it, or choose another file for {option}")
    if path.is_dir():
        raise SettingsError(f"{path} is a folder", f"give {option} a file, such as {example}")
    if path.exists() and not path.is_file():
        raise SettingsError(f"{path} is not a regular file", f"give {option} a file, such as {example}")
    if not os.access(folder, os.W_OK):
        raise SettingsError(f"{folder} is not writable", f"choose another folder for {option}")


@contextmanager
def whole_file(path: Path) -> Iterator[IO[str]]:
    """Open a file for text that replaces it at the end, with what there is then; not after an error without any text.

    A file that is not regular, such as /dev/null, is written to as it is. Raises OSError, and TriforceError that says
    where the text is if the file cannot be replaced, as another user's in a folder like /tmp.
    """
    target = target_of(path)
    if target.exists() and not target.is_file():
        with target.open("w", encoding="utf-8") as file:
            yield file
        return
    handle, name = temporary_for(target)
    is_complete = False
    try:
        with open(handle, "w", encoding="utf-8") as file:
            try:
                yield file
                is_complete = True
            finally:  # after an error or Ctrl-C too: hours of work may be in it
                file.flush()
                os.fsync(file.fileno())
    finally:
        if is_complete or os.path.getsize(name):
            _put_in_place(name, target)
        else:
            os.unlink(name)


def _put_in_place(name: str, target: Path) -> None:
    """Replace the target by the temporary file of that name, with the target's permissions, or those of a new file."""
    try:
        if target.exists():
            mode = stat.S_IMODE(target.stat().st_mode)
        else:
            umask = os.umask(0)
            os.umask(umask)
            mode = 0o666 & ~umask
        os.chmod(name, mode)
        os.replace(name, target)
    except OSError as error:
        raise TriforceError(f"{target} cannot be replaced: {error.strerror}", f"its text is in {name}") from error


def target_of(path: Path) -> Path:
    """Return the absolute path of a file, or of that which a link leads to, whether it exists or not."""
    return Path(os.path.realpath(path))  # unlike Path.resolve, no error for links that form a circle
