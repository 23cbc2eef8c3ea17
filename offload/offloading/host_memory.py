"""Memory on the host for what does not stay on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kv_cache.block_store import host_memory
from .link import Link, SimulatedLink

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


def allocator(device: torch.device) -> Allocate:
    """Gives uninitialised host memory that a device reaches well: pinned, for a GPU."""
    if device.type != "cuda":
        return host_memory
    from .cuda_link import pinned_memory

    return pinned_memory


def make_link(device: torch.device, gb_s: float | None = None) -> Link:
    """A simulated link of so many 10^9 bytes a second, or the device's own, which a CPU has not."""
    if gb_s is not None:
        return SimulatedLink(gb_s * 1e9)
    assert device.type == "cuda", "a CPU has no link but a simulated one"
    from .cuda_link import CudaLink

    return CudaLink(device)
