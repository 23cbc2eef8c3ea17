"""Makes the store that fits the backend."""

from __future__ import annotations

import torch

from ..architecture.config import ModelShape
from ..kernels.native import Kernel
from ..settings.kv_formats import EXACT, KV_FORMATS
from .block_store import BlockStore
from .plain_store import PlainStore
from .quantized_groups import GroupTiers
from .store import DeviceStore, Store


def new_store(
    kernel: Kernel | None,
    shape: ModelShape,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device,
    kv: str = EXACT,
    tiers: GroupTiers | None = None,
) -> Store:
    """Return an empty store for a sequence of up to `capacity` tokens, all in one memory.

    `kv` is their format. Another one than EXACT needs the native kernel or Triton's, and may lie over `tiers`.
    """
    if KV_FORMATS[kv].is_plain:
        return new_device_store(kernel, shape, capacity, dtype, device)
    store, own = KV_FORMATS[kv].store(kernel is not None), (shape, capacity, dtype)
    return store(*own, device, kv, tiers) if kernel is None else store(kernel, *own, kv, tiers)


def new_device_store(
    kernel: Kernel | None, shape: ModelShape, capacity: int, dtype: torch.dtype, device: torch.device
) -> DeviceStore:
    """Return such a store of keys and values as they are."""
    if kernel is not None and not shape.caps_scores:
        return BlockStore(kernel, shape, capacity, dtype)
    return PlainStore(shape, capacity, dtype, device, by_row=kernel is not None)
