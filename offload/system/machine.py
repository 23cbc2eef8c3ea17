"""Facts about this machine from the operating system: free memory, folders, usable cores. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    available: int = psutil.virtual_memory().available
    return min([available, *free_in_groups(_CGROUP)])


def free_memory(device: torch.device) -> int:
    """Return the free bytes on a device; for the CPU those of `free_host_memory`."""
    if device.type == "cuda":
        from torch import cuda

        free: int = cuda.mem_get_info(device)[0]
        return free
    return free_host_memory()


def default_home() -> Path:
    """Return the platform's cache folder for triforce (XDG on Linux)."""
    from platformdirs import user_cache_path

    return Path(user_cache_path("triforce"))


def free_in_groups(root: Path) -> Iterator[int]:
    """Yield the bytes left under each memory limit of a container; reclaimable file pages count as free."""
    for limit, used, statistics, droppable in _GROUP_FILES:
        try:
            numbers = [int((root / name).read_text()) for name in (limit, used)]
            rows = dict(line.split() for line in (root / statistics).read_text().splitlines())
            yield max(numbers[0] - numbers[1] + int(rows.get(droppable, 0)), 0)
        except (OSError, ValueError):  # no such group, or the word "max"
            continue


_SYSTEM = Path("/")
_QUOTA = ("cpu.cfs_quota_us", "cpu.cfs_period_us")  # of a control group, version 1; version 2 has both in cpu.max


def usable_cores(root: Path = _SYSTEM) -> int:
    """Return how many cores this process may use at once; `root` is where the system's files are.

    Each core counts once, however many threads it has: they share what decoding waits for. Efficiency cores count: the
    kernel hands out work in parts, so that a slow core takes fewer of them.
    """
    cores = len({_siblings(root, processor) for processor in allowed_processors()})
    return max(1, min([cores, _physical_cores(), *map(round, _quotas(root))]))


def allowed_processors() -> set[int]:
    """Return the numbers of the processors on which this process may run (taskset, a container's cpuset)."""
    process = psutil.Process()
    allowed = process.cpu_affinity() if hasattr(process, "cpu_affinity") else None  # macOS has none
    return set(allowed or range(psutil.cpu_count() or 1))


def _physical_cores() -> int:
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def _siblings(root: Path, processor: int) -> str:
    """Return the list of a core's processors, which is the same for all of them."""
    topology = root / f"sys/devices/system/cpu/cpu{processor}/topology"
    siblings = _first_text(topology / name for name in ("core_cpus_list", "thread_siblings_list"))
    return siblings or str(processor)


def _quotas(root: Path) -> Iterator[float]:
    """Yield the processors' worth of time that each control group leaves to this process (docker --cpus, CPUQuota)."""
    for line in _first_text([root / "proc/self/cgroup"]).splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        top = root / "sys/fs/cgroup"
        tops = [top / "cpu", top / kinds] if kinds else [top, top / "unified"]
        own = Path(path.lstrip("/"))  # within a container its own group is the top, and the path leads nowhere
        for folder in {top / part for top in tops for part in (own, *own.parents)}:
            texts = [_first_text([folder / name]) for name in _QUOTA] if kinds else [_first_text([folder / "cpu.max"])]
            quota, _, period = " ".join(texts).partition(" ")
            if quota.isdigit() and period.strip().isdigit():  # neither "max" nor -1
                yield max(int(quota) / max(int(period), 1), 1.0)


def _first_text(paths: Iterable[Path]) -> str:
    """Return the text of the first file that can be read, without blanks at its ends; empty if none can."""
    for path in paths:
        try:
            return path.read_text().strip()
        except OSError:
            continue
    return ""
