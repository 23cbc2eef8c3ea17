"""Makes the store that fits the backend."""

from __future__ import annotations

import torch

from ..architecture.config import ModelShape
from ..kernels.native import Kernel
from .block_store import BlockStore
from .store import PlainStore, Store


def new_store(
    kernel: Kernel | None, shape: ModelShape, capacity: int, dtype: torch.dtype, device: torch.device
) -> Store:
    """Return an empty store for a sequence of up to `capacity` tokens, all in one memory."""
    if kernel is not None:
        return BlockStore(kernel, shape, capacity, dtype)
    return PlainStore(shape, capacity, dtype, device)
