"""Numbers on their way to a GPU and back. Only `download` waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...memory.host_memory import pinned


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to the device without waiting: from pageable memory, the copy would wait."""
    if device.type == "cpu":
        return values
    return pinned(values).to(device, non_blocking=True)  # torch keeps pinned memory until its copies have ended


def download(values: Tensor) -> list[int]:
    """Return integers `[n]` of the device by one copy, which waits until the device has computed them."""
    return values.tolist()
