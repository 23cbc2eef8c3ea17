"""Memory nodes (NUMA): what decoding reads is interleaved over them, so that the channels of all of them are used.

Linux puts a page on the node of the thread that first writes to it: for weights that which loads them. Only what
`new_memory` returns is interleaved. The policy of the process is left alone, and respected where it has one (numactl).
"""

import contextlib
import ctypes
import mmap
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .machine import allowed_processors, listed

_DEFAULT, _INTERLEAVE = 0, 3  # memory policies, of linux/mempolicy.h
_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236), "riscv64": (235, 236)}  # numbers of mbind and get_mempolicy
_MOST_NODES = 1024


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes whose processors and memory this process may use; `is_interleaved`, or a `reason` why memory is not."""

    numbers: tuple[int, ...]
    is_interleaved: bool = False
    reason: str = ""


@cache
def nodes() -> Nodes:
    """Return the nodes, looked at once, and whether `new_memory` lies on all of them."""
    found = usable_nodes(allowed_processors())
    if len(found) < 2:
        return Nodes(found)
    try:
        if _policy() != _DEFAULT:
            return Nodes(found, reason="the process has a memory policy of its own")
        with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
            _bind(page, found)
    except OSError as error:  # a container that may not set policies
        return Nodes(found, reason=f"the system refuses it: {error.strerror}")
    return Nodes(found, is_interleaved=True)


def new_memory(size: int) -> mmap.mmap:
    """Return `size` bytes of private memory over the nodes in turn, in huge pages if there are any.

    They are 0, and committed on first write.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    with contextlib.suppress(OSError, AttributeError):  # a Linux kernel built without them, or another system
        memory.madvise(mmap.MADV_HUGEPAGE)
    if nodes().is_interleaved:
        with contextlib.suppress(OSError):  # a cpuset may have changed since they were looked at
            _bind(memory, nodes().numbers)
    return memory


def usable_nodes(processors: set[int], root: Path = Path("/")) -> tuple[int, ...]:
    """Return the nodes with some of the processors and with memory for this process; `root` has the system's files."""
    try:
        status = (root / "proc/self/status").read_text()
        allowed = listed(status.partition("Mems_allowed_list:")[2].partition("\n")[0])
        folders = {int(each.name[4:]): each for each in (root / "sys/devices/system/node").glob("node[0-9]*")}
        lists = {number: folder / "cpulist" for number, folder in folders.items() if number in allowed}
        return tuple(sorted(number for number, file in lists.items() if listed(file.read_text()) & processors))
    except (OSError, ValueError):  # not Linux, or files that a sandbox leaves out
        return ()


def _policy() -> int:
    """Return the memory policy of the calling thread. Raises OSError."""
    mode = ctypes.c_int()
    _call(1, ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
    return mode.value


def _bind(memory: mmap.mmap, numbers: tuple[int, ...]) -> None:
    """Interleave pages that nothing was written to yet over nodes. Raises OSError."""
    mask = sum(1 << number for number in numbers if number < _MOST_NODES).to_bytes(_MOST_NODES // 8, sys.byteorder)
    count = ctypes.c_ulong(_MOST_NODES + 1)  # of bits, and one more, which the system takes away
    address, size = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
    _call(0, ctypes.c_void_p(address), ctypes.c_ulong(size), _INTERLEAVE, mask, count, ctypes.c_uint(0))


def _call(which: int, *arguments: object) -> None:
    """Call mbind (0) or get_mempolicy (1), for which the C library has no functions. Raises OSError."""
    numbers = _CALLS.get(platform.machine())
    if sys.platform != "linux" or numbers is None:
        raise OSError(0, "not known for this system")
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(ctypes.c_long(numbers[which]), *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
