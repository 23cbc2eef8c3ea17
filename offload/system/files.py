"""Atomic writes, and reads up to a limit. A file exists as a whole or not at all, whatever happens while it is written.

Files, pipes and standard input are read in chunks, because Python handles signals between two reads. Devices are
refused; a pipe may have no end.
"""

import atexit
import hashlib
import io
import os
import secrets
import select
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ..units import size_text

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

TEMPORARY = ".part-"  # prefix of the names of files that are being written
_EXPIRY = 3600  # seconds after which such a file of the user's folders is removed, where no process writes it
_written: set[str] = set()  # the temporary files of this process; of those that are finished, names of nothing


def replace_file(path: Path, *data: bytes | memoryview, sync: bool = True) -> None:
    """Write `data` to a temporary file readable by its owner only, and rename it to `path`. Raises OSError.

    Without `sync` a power cut may leave part of it there: for what is verified when it is read.
    """
    temporary = _new_name(path)
    try:
        with open(_create(temporary, path), "wb") as file:
            file.writelines(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # the first error says what is wrong, and names what was asked for
            os.unlink(temporary)
        raise
    finally:
        _written.discard(temporary)


def temporary_for(path: Path) -> tuple[int, str]:
    """Return the descriptor and the name of a new file beside `path`, its owner's only. Raises OSError."""
    return _create(name := _new_name(path), path), name


def _new_name(path: Path) -> str:
    """Return a name for a temporary file, noted before the file exists: a signal may come as soon as it does."""
    name = str(path.parent / f"{_prefix(path)}{secrets.token_hex(8)}")
    _written.add(name)
    return name


def _create(name: str, path: Path) -> int:
    try:
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    except OSError as error:  # it names a file that nobody asked for
        raise OSError(error.errno, error.strerror, str(path)) from error
    _lock(handle)
    return handle


def remove_temporaries() -> None:
    """Remove the temporary files of this process that exist: it ends, perhaps without unwinding."""
    for name in list(_written):
        try:
            os.unlink(name)
        except OSError:  # renamed, as most are
            pass


def keep_temporary(name: str) -> None:
    """Let a temporary file of this process stay when it ends."""
    _written.discard(name)


atexit.register(remove_temporaries)  # a signal between two steps of Python may leave one
if fcntl is not None:
    os.register_at_fork(after_in_child=_written.clear)


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


_CHUNK = 2**20  # bytes


class Unbounded(ValueError):
    """A source that is endless or larger than the limit. The message continues a name: "is a device, …"."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def read_bounded(stream: Any, limit: int) -> bytes:
    """Return a stream's bytes, text as UTF-8. Raises OSError, and Unbounded above `limit` bytes and for devices."""
    found = io.BytesIO()  # grows in place, and returns its bytes without a copy
    copy_bounded(stream, found, limit)
    return found.getvalue()


def copy_bounded(stream: Any, target: IO[bytes], limit: int) -> None:
    """Write a stream's bytes into an empty file, text as UTF-8. Raises as `read_bounded`."""
    _check_bounded(stream, limit)
    read = _bounded_reader(stream)
    while chunk := read(_CHUNK):
        if isinstance(chunk, str):  # a text stream without a byte stream, as in notebooks and tests
            chunk = chunk.encode("utf-8", errors="replace")
        if target.tell() + len(chunk) > limit:
            raise _too_large(f"has more than {limit:,} bytes, the most that are read", limit)
        target.write(chunk)


def _bounded_reader(stream: Any) -> Callable[[int], bytes | str]:
    """Return a function that reads at most so many bytes, as soon as some are available, and nothing at the end.

    Some parent processes (Node, for example) make a pipe non-blocking. Such a pipe is polled until it has data, because
    it otherwise returns nothing before its end.
    """
    try:
        number = stream.fileno()
        blocking = os.get_blocking(number)
    except (AttributeError, OSError, ValueError):  # no real file, or a system without get_blocking
        blocking = True
    if blocking:
        read_some: Callable[[int], bytes | str] = getattr(stream, "read1", stream.read)
        return read_some

    def read(size: int) -> bytes:
        while True:
            select.select([number], [], [])
            with suppress(BlockingIOError):  # another reader of the same pipe was faster
                return os.read(number, size)

    return read


def _check_bounded(stream: Any, limit: int) -> None:
    """Raise Unbounded for a device or a file above the limit, before anything is read."""
    try:
        number = stream.fileno()
        status = os.fstat(number)
    except (AttributeError, OSError, ValueError):
        return  # no real file: an object in memory
    mode = status.st_mode
    if stat.S_ISREG(mode) and status.st_size - os.lseek(number, 0, os.SEEK_CUR) > limit:
        raise _too_large(f"has {status.st_size:,} bytes, more than the {limit:,} that are read", limit)
    if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not _is_harmless(number, status)):
        raise Unbounded("is a device, which has no text and may have no end", "give a text file or a pipe")


def _is_harmless(number: int, status: os.stat_result) -> bool:
    """Return whether a character device is a terminal, which ends with Ctrl-D, or the null device."""
    return os.isatty(number) or status.st_rdev == os.stat(os.devnull).st_rdev


def _too_large(message: str, limit: int) -> Unbounded:
    return Unbounded(message, f"give a part of it: head -c {limit} takes the first {size_text(limit)}")
