"""Host memory for data that does not stay on the device, and the link between the two."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..settings.validation import require
from .block_store import host_memory
from .disk_link import DiskLink
from .link import Link, SimulatedLink
from .pinning import Pinning
from .staged_link import StagedLink

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


def allocator(device: torch.device) -> Allocate:
    """Return the allocator of uninitialised host memory for a device: pinned memory for a GPU."""
    if device.type != "cuda":
        return host_memory
    from .cuda_link import pinned_memory

    return pinned_memory


def begin_allocation(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Pinning | None]:
    """Return uninitialised host memory for a device, and what pins it for a GPU in the background."""
    memory = host_memory(size, dtype)
    return memory, Pinning(memory) if device.type == "cuda" and memory.nbytes else None


def make_link(device: torch.device, gb_s: float | None = None, to_disk: bool = False) -> Link:
    """Return a simulated link of `gb_s` 10^9 bytes/s, or if None the device's own; a CPU has one to the disk only.

    `to_disk`: pages may lie on disk, too. Raises SettingsError for a CPU alone.
    """
    if to_disk and device.type == "cpu" and gb_s is None:
        return DiskLink()
    if to_disk:
        return StagedLink(make_link(device, gb_s), device, allocator(device))
    if gb_s is not None:
        return SimulatedLink(gb_s * 1e9)
    hint = "give the rate of a simulated one, such as link_gb_s=25, or a folder on disk"
    require(device.type == "cuda", f"a {device.type} has no link to offload keys and values over", hint)
    from .cuda_link import CudaLink

    return CudaLink(device)
