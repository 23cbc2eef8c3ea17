"""The processor that computes, and this process's peak memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.system import platform
from offload.system.platform import processor_name

if TYPE_CHECKING:
    import torch


def processor(device: torch.device) -> str:
    """Return the name of the GPU or CPU that computes."""
    if device.type == "cuda":
        from torch import cuda

        return cuda.get_device_name(device)
    return processor_name()


def peak_memory(device: torch.device) -> int:
    """Return the most memory used so far, in bytes: on a GPU by torch, else resident in this process."""
    if device.type == "cuda":
        from torch import cuda

        return cuda.max_memory_allocated(device)
    return platform.peak_memory()
