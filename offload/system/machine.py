"""Facts about this machine from the operating system: free memory, folders. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")
_GROUP_FILES = (  # limit, usage and statistics of a control group, version 2 and version 1
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def free_host_memory() -> int:
    """Return the free bytes of host memory, at most those left in the process's control group (a container's limit)."""
    return min([psutil.virtual_memory().available, *free_in_groups(_CGROUP)])


def free_memory(device: torch.device) -> int:
    """Return the free bytes on a device; for the CPU those of `free_host_memory`."""
    if device.type == "cuda":
        from torch import cuda

        return cuda.mem_get_info(device)[0]
    return free_host_memory()


def default_home() -> Path:
    """Return the platform's cache folder for triforce (XDG on Linux)."""
    from platformdirs import user_cache_path

    return user_cache_path("triforce")


def file_system(folder: Path) -> str:
    """Return the type of the file system that a folder is in, such as ext4; empty where that is not known."""
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    resolved = folder.resolve()
    return next((mounts[path] for path in (resolved, *resolved.parents) if path in mounts), "")


def free_in_groups(root: Path) -> Iterator[int]:
    """Yield the bytes left under each memory limit of a container; reclaimable file pages count as free."""
    for limit, used, statistics, droppable in _GROUP_FILES:
        try:
            numbers = [int((root / name).read_text()) for name in (limit, used)]
            rows = dict(line.split() for line in (root / statistics).read_text().splitlines())
            yield max(numbers[0] - numbers[1] + int(rows.get(droppable, 0)), 0)
        except (OSError, ValueError):  # no such group, or the word "max"
            continue
