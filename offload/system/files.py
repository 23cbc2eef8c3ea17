"""Atomic writes, and reads up to a limit. A file exists as a whole or not at all, whatever happens while it is written.

Files, pipes and standard input are read in chunks, because Python handles signals between two reads. Devices are
refused; a pipe may have no end.
"""

import io
import os
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp
from typing import Any

from ..units import size_text
from .platform import block_until_data, is_null

TEMPORARY = ".part-"  # prefix of the names of files that are being written


def replace_file(path: Path, *data: bytes | memoryview, sync: bool = True) -> None:
    """Write `data` to a temporary file readable by its owner only, and rename it to `path`. Raises OSError.

    Without `sync` a power cut may leave part of it there: for what is verified when it is read.
    """
    handle, temporary = temporary_for(path)
    try:
        with open(handle, "wb") as file:
            file.writelines(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # the first error says what is wrong, and names what was asked for
            os.unlink(temporary)
        raise


def temporary_for(path: Path) -> tuple[int, str]:
    """Return the descriptor and the name of a new file beside `path`, its owner's only. Raises OSError."""
    try:
        return mkstemp(prefix=TEMPORARY, dir=path.parent)
    except OSError as error:  # it names a file that nobody asked for
        raise OSError(error.errno, error.strerror, str(path)) from error


_CHUNK = 2**20  # bytes


class Unbounded(ValueError):
    """A source that is endless or larger than the limit. The message continues a name: "is a device, …"."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def read_bounded(stream: Any, limit: int) -> bytes:
    """Return a stream's bytes, text as UTF-8. Raises OSError, and Unbounded above `limit` bytes and for devices."""
    _check_bounded(stream, limit)
    block_until_data(stream)
    read, data = getattr(stream, "read1", stream.read), io.BytesIO()  # grows in place; its bytes need no copy
    while chunk := read(_CHUNK):
        if isinstance(chunk, str):  # a text stream without a byte stream, as in notebooks and tests
            chunk = chunk.encode("utf-8", errors="replace")
        if data.tell() + len(chunk) > limit:
            raise _too_large(f"has more than {limit:,} bytes, the most that are read", limit)
        data.write(chunk)
    return data.getvalue()


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
    return os.isatty(number) or is_null(status)


def _too_large(message: str, limit: int) -> Unbounded:
    return Unbounded(message, f"give a part of it: head -c {limit} takes the first {size_text(limit)}")
