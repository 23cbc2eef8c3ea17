"""The parts of a tiered store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .balance import Balance
from .disk_pages import DiskPages
from .host_attention import HostThread
from .host_tensors import host_memory
from .link import Link
from .page import PageFormat
from .pinning import Pinning
from .prefetch import PrefetchRing
from .quantized_pages import QuantizedPageFormat
from .store import Store


@dataclass(kw_only=True)
class TierParts:
    """What every tiered store has: page format, link, prefetch ring, host attention, and memory."""

    format: PageFormat | QuantizedPageFormat
    link: Link
    ring: PrefetchRing
    balance: Balance
    host: HostThread | None  # None: every page is streamed
    resident_layers: int  # the first ones, whose KV stays on the device
    pages: Tensor | DiskPages  # [layers - resident_layers, pages, numbers] in host memory, or on disk
    open: Tensor  # [layers - resident_layers, slots, numbers] on the device; see OpenPages
    pinning: Pinning | None  # of `pages`, which may still be under way
    last_visits: int  # how many of the model's layers attend to the last layer of the store


@dataclass(kw_only=True)
class Tiers(TierParts):
    """The parts of a tiered store of keys and values as they are."""

    resident: Store | None  # KV of the resident layers
    near: Callable[[int], Store]  # makes an empty store on the device for a number of tokens
    prefills_plainly: bool = False  # layer by layer, over plain keys: where pages are not what attention reads best


@dataclass(kw_only=True)
class QuantizedTiers(TierParts):
    """The parts of a tiered store of quantised keys and values."""

    staging: Tensor | None = None  # pinned memory for gathered groups, from the first time on; pinning takes long

    def new_memory(self, size: tuple[int, ...]) -> Tensor:
        """Return uninitialised memory for pages on the device."""
        with torch.inference_mode(False):
            if self.open.device.type == "cpu":
                return host_memory(size, torch.uint8)
            return torch.empty(size, dtype=torch.uint8, device=self.open.device)
