"""The user's files, written whole or not at all, or line by line; permissions stay as they are."""

import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from offload.errors import SettingsError, TriforceError
from offload.system.files import temporary_for

from .stdout_formats import json_line


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


@contextmanager
def whole_file(path: Path) -> Iterator[IO[str]]:
    """Open a file for text that replaces it at the end, with what there is then; not after an error without any text.

    What is no regular file, such as /dev/null, is written to as it is. Raises OSError, and TriforceError that names
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
        if not is_complete and not os.path.getsize(name):
            os.unlink(name)
        else:
            _put_in_place(name, target)


def _put_in_place(name: str, target: Path) -> None:
    try:
        os.chmod(name, permissions_of(target))
        os.replace(name, target)
    except OSError as error:
        raise TriforceError(f"{target} cannot be replaced: {error.strerror}", f"its text is in {name}") from error


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


class LineFile:
    """A file of lines of one kind. It is locked while it is open.

    Attributes:
        kept: what `keep` returned for each line that was there, in order.
    """

    def __init__(
        self,
        path: Path,
        option: str,
        what: str,
        keep: Callable[[Any], Any],
        warn: Callable[[str], None],
        types: Sequence[str],
        name: str | None = None,
    ) -> None:
        """Open or create the file, and drop a last line that was cut. Raises SettingsError, and changes no other file.

        What is no regular file, such as a named pipe, has nothing to resume from.

        Args:
            option: the option that names the file, for messages; `name` is the file's name in them.
            what: what a line is, for messages: "result of a batch".
            keep: returns what to keep of a line's value; None if it is not of this kind.
            types: the types with which lines of this kind begin, by which one that was cut is told from a foreign file.
        """
        self.kept: list[Any] = []
        self._name, self._option, self._keep = name or str(path), option, keep
        self._new = None if path.exists() else target_of(path)  # removed again if nothing is written to it
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - `close` closes it
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise self._error(getattr(error, "strerror", None) or str(error), "name a file") from None
        try:
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._lock()
                self._resume(what, [json_line(type=each).rstrip("}\n").encode() for each in types], warn)
        except BaseException:
            self.close()
            raise

    def write(self, line: str) -> None:
        """Append a line whole, at once. Raises OSError."""
        data = memoryview(line.encode())
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._name) from error

    def close(self) -> None:
        """Close the file; remove it if it was created here and is empty, as after a request that was refused."""
        if self._new is not None and not os.fstat(self._file.fileno()).st_size:
            self._new.unlink(missing_ok=True)
        self._file.close()

    def _error(self, reason: str, hint: str = "name another file") -> SettingsError:
        return SettingsError(f"{self._option} {self._name}: {reason[:1].lower()}{reason[1:]}", hint)

    def _lock(self) -> None:
        """Raise SettingsError if another run appends to the file."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._error("another run appends to it") from None
        except OSError:  # a file system without locks
            pass

    def _resume(self, what: str, beginnings: Sequence[bytes], warn: Callable[[str], None]) -> None:
        """Keep what is finished, and drop a last line that was cut, or give it its end."""
        self._file.seek(0)
        *lines, last = self._file.read().split(b"\n")
        for number, line in enumerate(lines, 1):
            if (kept := self._kept(line)) is None:
                raise self._error(f"line {number} is no {what}, and nothing is appended to it")
            self.kept.append(kept)
        if not last:
            return
        if (kept := self._kept(last)) is not None:
            self.kept.append(kept)
            self._file.write(b"\n")
            return
        is_cut = bool(self.kept) or any(last.startswith(each) or each.startswith(last) for each in beginnings)
        if not is_cut or _is_json(last):
            raise self._error(f"line {len(lines) + 1} is no {what}, and nothing is appended to it")
        self._file.truncate(sum(len(line) + 1 for line in lines))
        warn(f"{self._name}: the last line was cut while it was written, and is dropped")

    def _kept(self, line: bytes) -> Any:
        return self._keep(json.loads(line)) if _is_json(line) else None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
