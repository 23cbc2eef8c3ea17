"""What this machine is called, for results that are kept."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def processor(device: torch.device) -> str:
    """The name of what computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:  # not Linux
        names = []
    return names[0] if names and names[0] else platform.processor() or platform.machine()
