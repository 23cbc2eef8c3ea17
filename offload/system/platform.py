"""All that differs between Linux, macOS and Windows. Imports nothing heavy, and no module that only one of them has.

A function whose call the system lacks does without it; its docstring says what is then missing.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

END_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_seeking = threading.Lock()


def new_memory(size: int) -> mmap.mmap:
    """Return `size` bytes of private memory, 0 and committed on first write, in huge pages on Linux.

    Every token reads this memory: with small pages, TLB misses take a quarter of the time.
    """
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a Linux kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def release_pages(memory: mmap.mmap) -> None:
    """Drop the pages of a mapped file from this process, except on Windows; they are read again when needed."""
    if sys.platform != "win32" and hasattr(mmap, "MADV_DONTNEED"):
        with suppress(OSError):  # of locked memory
            memory.madvise(mmap.MADV_DONTNEED)


def drop_cached(descriptor: int) -> None:
    """Drop a file from the page cache, so that reading it measures the disk; only on Linux."""
    if sys.platform == "linux" and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def allocate(descriptor: int, size: int) -> None:
    """Make a file `size` bytes long and reserve its space, where the file system can. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))
            return
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise
    os.ftruncate(descriptor, size)


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Read from `offset` of a file into `view` by one call; return how many bytes. Raises OSError."""
    if sys.platform != "win32" and hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    with _seeking:
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, len(view))
    view[: len(data)] = data
    return len(data)


def write_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Write `view` to `offset` of a file by one call; return how many bytes. Raises OSError."""
    if sys.platform != "win32" and hasattr(os, "pwrite"):
        return os.pwrite(descriptor, view, offset)
    with _seeking:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, view)


def block_until_data(stream: Any) -> None:
    """Let reads of a pipe wait for data: some parent processes (Node, for example) leave it non-blocking."""
    if sys.platform != "win32" and hasattr(os, "set_blocking"):
        with suppress(AttributeError, OSError, ValueError):  # no real file, but an object in memory
            os.set_blocking(stream.fileno(), True)


def is_null(status: os.stat_result) -> bool:
    """Return whether the status is that of the null device; Windows does not tell."""
    return getattr(status, "st_rdev", 0) == getattr(os.stat(os.devnull), "st_rdev", 1)


def others_can_write(folder: Path) -> bool:
    """Return whether users other than this one and root can write to a folder; False on Windows. Raises OSError."""
    if not hasattr(os, "geteuid"):
        return False
    status, user = folder.stat(), os.geteuid()
    return bool(status.st_mode & stat.S_IWOTH) or (user != 0 and status.st_uid not in (0, user))


@contextmanager
def without_echo(stdin: Any) -> Iterator[None]:
    """Return a context in which a terminal does not show what is typed; on Windows it does."""
    try:
        termios = import_module("termios")
    except ImportError:
        yield
        return
    before = termios.tcgetattr(stdin)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(stdin, termios.TCSANOW, silent)
        yield
    finally:
        termios.tcsetattr(stdin, termios.TCSANOW, before)


def enable_escapes() -> None:
    """Let a console of Windows interpret escape sequences; the others do."""
    if sys.platform == "win32":
        os.system("")  # the shell enables them, and leaves them enabled


def limit_address_space(size: int) -> None:
    """Limit the memory of this process to `size` bytes of addresses; only on Linux."""
    with suppress(ImportError, AttributeError, OSError, ValueError):
        resource = import_module("resource")
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def processor_name() -> str:
    """Return the name of this machine's CPU."""
    return _line_of("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def peak_memory() -> int:
    """Return the most bytes that were resident in this process; on macOS those that are now.

    Not ru_maxrss: that survives exec and may be the parent's.
    """
    import psutil

    if kibibytes := _line_of("/proc/self/status", "VmHWM").removesuffix(" kB"):
        return int(kibibytes) * 1024
    memory = psutil.Process().memory_info()
    return int(getattr(memory, "peak_wset", memory.rss))


def _line_of(path: str, name: str) -> str:
    """Return the value of the first line `name: value` of a file of Linux; "" without one, as on other systems."""
    try:
        lines = Path(path).read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
