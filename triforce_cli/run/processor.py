"""The processor that computes, what other processes use of it, and this process's peak memory."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch


def processor(device: torch.device) -> str:
    """Return the name of the GPU or CPU that computes."""
    if device.type == "cuda":
        from torch import cuda

        return cuda.get_device_name(device)
    return processor_name()


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:  # not Linux
        names = []
    return names[0] if names and names[0] else platform.processor() or platform.machine()


def peak_memory(device: torch.device) -> int:
    """Return the most memory held so far, in bytes: on a GPU by torch, else resident in this process.

    Not ru_maxrss: that survives exec and may be the parent's. Where the system keeps no peak, the current value.
    """
    if device.type == "cuda":
        from torch import cuda

        return cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss


class OtherLoad:
    """Measures the cores that other processes use, from its construction on."""

    def __init__(self) -> None:
        self._start = self._read()

    def cores(self) -> float:
        """Return the mean number of cores that other processes have used so far."""
        seconds, busy, own = (now - then for now, then in zip(self._read(), self._start, strict=True))
        return max(busy - own, 0.0) / seconds if seconds > 0 else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Return the time, and the CPU seconds of all processes and of this one."""
        machine, process = psutil.cpu_times(), os.times()
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        # On Linux the time of virtual machines' guests is in user and nice as well.
        counted_twice = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        return time.monotonic(), sum(machine) - counted_twice - idle, process.user + process.system
