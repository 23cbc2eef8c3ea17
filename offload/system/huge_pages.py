"""Memory in huge pages, for what every token reads: TLB misses of small ones take time."""

import contextlib
import mmap


def new_memory(size: int) -> mmap.mmap:
    """Return `size` bytes of private memory, 0 and committed on first write, in huge pages if there are any."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    with contextlib.suppress(OSError, AttributeError):  # a Linux kernel built without them, or another system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
