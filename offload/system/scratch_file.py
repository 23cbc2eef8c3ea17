"""A scratch file: data of one run on disk, which nobody else can open, and of which nothing is left behind."""

import errno
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..errors import OutOfDisk, SettingsError
from ..units import size_text
from .platform import allocate, read_at, write_at


class ScratchFile:
    """A file of `size` bytes without a name, mode 0600, whose space is allocated at once.

    The system frees it when its process ends, however that happens. Raises SettingsError for a folder in which no file
    can be made, OutOfDisk if there is no room.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open as long as this is
        except OSError as error:
            raise SettingsError(
                f"no file can be made in {folder}: {(error.strerror or str(error)).lower()}",
                "name a folder on a disk, in which you may write",
            ) from error
        try:
            allocate(self.fileno(), size)  # a full disk is an error before the run and not in its middle
        except OSError as error:
            free = shutil.disk_usage(folder).free
            raise OutOfDisk(
                f"no room on the disk of {folder}: {size_text(size)} needed, {size_text(free)} free",
                "free some space, give --disk a folder on another disk, or more --host-memory",
            ) from error

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._file.fileno()

    def read(self, view: memoryview, offset: int) -> None:
        """Fill a writable view of bytes with what the file has from `offset` on. Raises OSError."""
        self._all(self.read_some, view, offset)

    def write(self, view: memoryview, offset: int) -> None:
        """Write a view of bytes from `offset` on. Raises OSError."""
        self._all(self.write_some, view, offset)

    def read_some(self, view: memoryview, offset: int) -> int:
        """Return how many bytes one call of the system has read; it may be fewer than asked for."""
        return read_at(self.fileno(), view, offset)

    def write_some(self, view: memoryview, offset: int) -> int:
        """Return how many bytes one call of the system has written."""
        return write_at(self.fileno(), view, offset)

    def _all(self, call: Callable[[memoryview, int], int], view: memoryview, offset: int) -> None:
        """Repeat a call until the whole view is done. Raises OSError where it does nothing."""
        while len(view):
            done = call(view, offset)
            if not done:
                raise OSError(errno.EIO, "the file ends too early")
            view, offset = view[done:], offset + done
