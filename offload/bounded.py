"""Read what a user names, up to a limit: devices have no end, pipes may have none.

In chunks, because Python answers signals between two reads: within one of an endless source it never would.
"""

from __future__ import annotations

import io
import os
import select
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .units import size_text

_CHUNK = 2**20  # bytes


class Unbounded(ValueError):
    """It has no end, or more bytes than are read. The message goes on after a name: "is a device, …"."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def read_bounded(stream: Any, limit: int) -> bytes:
    """Return all that a stream gives, text as UTF-8. Raises Unbounded above `limit` bytes and for devices, OSError."""
    _check(stream, limit)
    read = _reader(stream)
    found = io.BytesIO()  # grows in place, and gives what it holds without a copy
    while chunk := read(_CHUNK):
        if isinstance(chunk, str):  # a text stream without bytes below, as notebooks and tests have
            chunk = chunk.encode("utf-8", errors="replace")
        if found.tell() + len(chunk) > limit:
            raise _too_large(f"has more than {limit:,} bytes, the most that are read", limit)
        found.write(chunk)
    return found.getvalue()


def _reader(stream: Any) -> Callable[[int], bytes | str]:
    """Return what reads a chunk of what is there, without waiting for all of it; nothing is the end.

    A pipe that some parents (Node, for one) have made non-blocking gives nothing also where there is nothing yet: it is
    waited for.
    """
    try:
        number = stream.fileno()
        waits = os.get_blocking(number)
    except (AttributeError, OSError, ValueError):  # no real file below, or a system without the question
        waits = True
    if waits:
        return getattr(stream, "read1", stream.read)

    def read(size: int) -> bytes:
        while True:
            select.select([number], [], [])
            with suppress(BlockingIOError):  # another reader of the same pipe was quicker
                return os.read(number, size)

    return read


def _check(stream: Any, limit: int) -> None:
    """Refuse what can be seen to be a device or too large before anything is read."""
    try:
        number = stream.fileno()
        status = os.fstat(number)
    except (AttributeError, OSError, ValueError):
        return  # no real file below: an object that holds what it gives
    mode = status.st_mode
    if stat.S_ISREG(mode) and status.st_size - os.lseek(number, 0, os.SEEK_CUR) > limit:
        raise _too_large(f"has {status.st_size:,} bytes, more than the {limit:,} that are read", limit)
    if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not _is_harmless(number, status)):
        raise Unbounded("is a device, which holds no text and may have no end", "give a text file or a pipe")


def _is_harmless(number: int, status: os.stat_result) -> bool:
    """Whether a character device is a terminal, which ends with Ctrl-D, or the null device."""
    return os.isatty(number) or status.st_rdev == os.stat(os.devnull).st_rdev


def _too_large(message: str, limit: int) -> Unbounded:
    return Unbounded(message, f"give a part of it: head -c {limit} takes the first {size_text(limit)}")
