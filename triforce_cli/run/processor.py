"""The processor that computes, and this process's peak memory."""

from __future__ import annotations

import platform
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
