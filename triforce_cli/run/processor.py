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
    """Return the name of this machine's CPU."""
    return _line_of("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def peak_memory(device: torch.device) -> int:
    """Return the most memory used so far, in bytes: on a GPU by torch, else resident in this process.

    Not ru_maxrss: that survives exec and may be the parent's. Where the system keeps no peak, the current value.
    """
    if device.type == "cuda":
        from torch import cuda

        return cuda.max_memory_allocated(device)
    kibibytes = _line_of("/proc/self/status", "VmHWM").removesuffix(" kB")
    return int(kibibytes) * 1024 if kibibytes else psutil.Process().memory_info().rss


def _line_of(path: str, name: str) -> str:
    """Return the value of the first line `name: value` of a file of Linux; "" without one, as on other systems."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
