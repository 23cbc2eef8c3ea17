"""A scratch file: data of one run on disk, which nobody else can open, and of which nothing is left behind.

It has no name in its folder, so the system frees it when its process ends, however that happens. It is read and written
past the system's page cache, which would hold a second copy of it in the memory that it is meant to save.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import OutOfDisk, SettingsError
from ..units import size_text

ALIGNMENT = 4096  # bytes: of memory, offsets and sizes where the page cache is bypassed; no disk has larger blocks
_PIECE = 2**22  # bytes that pass through memory of this file's own at once, where the caller's is not aligned
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR, errno.ENOSYS)


class ScratchFile:
    """A file of `size` bytes without a name, mode 0600, whose space is allocated at once.

    Attributes:
        folder: where it lies.
        is_direct: whether reads and writes bypass the page cache; only if `direct`, and where the file system can.

    Raises SettingsError for a folder in which no file can be made, OutOfDisk if there is no room.
    """

    def __init__(self, folder: Path, size: int, direct: bool = True) -> None:
        self.folder = folder
        self._fd = _open_unnamed(folder)
        weakref.finalize(self, os.close, self._fd)
        self.size = -(-size // ALIGNMENT) * ALIGNMENT
        self._allocate()
        self.is_direct = direct and self._set_direct(True)
        self._aligned: mmap.mmap | None = None  # for memory that is not aligned

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._fd

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill writable views of bytes, in order, with what the file has from `offset` on. Raises OSError."""
        if self._must_copy(views, offset):
            for view, at in _pieces(views, offset):
                self._read_copied(view, at)
        else:
            self._all(self.read_some, views, offset)

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        """Write views of bytes, one behind the other, from `offset` on. Raises OSError.

        While `is_direct`, `offset` and the size of each view are multiples of ALIGNMENT.
        """
        if self._must_copy(views, offset):
            for view, at in _pieces(views, offset):
                memory = self._buffer(len(view))
                memory[:] = view
                self._all(self.write_some, [memory], at)
        else:
            self._all(self.write_some, views, offset)

    def read_some(self, views: Sequence[memoryview], offset: int) -> int:
        """Return how many bytes one call of the system has read; it may be fewer than asked for."""
        return os.preadv(self._fd, views, offset)

    def write_some(self, views: Sequence[memoryview], offset: int) -> int:
        """Return how many bytes one call of the system has written."""
        return os.pwritev(self._fd, views, offset)

    def _allocate(self) -> None:
        """Allocate the file's space now, so that a full disk is an error before the run and not in its middle."""
        try:
            try:
                os.posix_fallocate(self._fd, 0, self.size)
            except AttributeError:  # macOS
                os.ftruncate(self._fd, self.size)
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
                os.ftruncate(self._fd, self.size)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            free = shutil.disk_usage(self.folder).free
            raise OutOfDisk(
                f"no room on the disk of {self.folder}: {size_text(self.size)} needed, {size_text(free)} free",
                "free some space, give --disk a folder on another disk, or more --host-memory",
            ) from error

    def _set_direct(self, on: bool) -> bool:
        """Bypass the page cache, or use it; return whether the file system allows that."""
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
        except OSError:
            return False
        return bool(flag)

    def _must_copy(self, views: Sequence[memoryview], offset: int) -> bool:
        numbers = [offset, *(number for view in views for number in (len(view), _address(view)))]
        return self.is_direct and any(number % ALIGNMENT for number in numbers)

    def _read_copied(self, view: memoryview, offset: int) -> None:
        """Fill a view from the aligned bytes around it."""
        before = offset % ALIGNMENT
        memory = self._buffer(-(-(before + len(view)) // ALIGNMENT) * ALIGNMENT)
        self._all(self.read_some, [memory], offset - before)
        view[:] = memory[before : before + len(view)]

    def _buffer(self, size: int) -> memoryview:
        """Return aligned memory of the file's own."""
        if self._aligned is None or len(self._aligned) < size:
            self._aligned = mmap.mmap(-1, max(size, _PIECE + ALIGNMENT))
        return memoryview(self._aligned)[:size]

    def _all(self, call: Callable[[Sequence[memoryview], int], int], views: Sequence[memoryview], offset: int) -> None:
        """Repeat a call until all views are done: one call may do a part. Raises OSError where it does nothing."""
        rest = list(views)
        while rest:
            try:
                done = call(rest, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.is_direct:
                    raise
                self.is_direct = False  # a file system that allows it, but not for this file
                self._set_direct(False)
                continue
            if self.is_direct:
                done -= done % ALIGNMENT
            if not done:
                raise OSError(errno.EIO, "the file ends too early")
            offset += done
            while rest and done >= len(rest[0]):
                done -= len(rest.pop(0))
            if done:
                rest[0] = rest[0][done:]


def _open_unnamed(folder: Path) -> int:
    """Return the descriptor of a new file without a name, for its owner alone. Raises SettingsError."""
    try:
        flag = getattr(os, "O_TMPFILE", 0)
        if flag:
            try:
                return os.open(folder, flag | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
        descriptor, path = tempfile.mkstemp(prefix=".triforce-", dir=folder)
        os.unlink(path)
        return descriptor
    except OSError as error:
        raise SettingsError(
            f"no file can be made in {folder}: {(error.strerror or str(error)).lower()}",
            "name a folder on a disk, in which you may write",
        ) from error


def _pieces(views: Sequence[memoryview], offset: int) -> list[tuple[memoryview, int]]:
    """Divide views into pieces for the file's own memory; return each with its offset in the file."""
    found = []
    for view in views:
        found += [(view[at : at + _PIECE], offset + at) for at in range(0, len(view), _PIECE)]
        offset += len(view)
    return found


def view_of(address: int, size: int) -> memoryview:
    """Return memory as writable bytes; it must outlive the view."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _address(view: memoryview) -> int:
    with contextlib.suppress(TypeError, ValueError):
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    return 1  # read-only: its address is not known
