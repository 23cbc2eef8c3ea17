"""What a tiered store is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..kv_cache.store import Store
from .balance import Balance
from .host_attention import HostAttention
from .link import Link
from .page import PageFormat
from .prefetch import PrefetchRing


@dataclass
class Tiers:
    """What a tiered store is made of."""

    format: PageFormat
    link: Link
    ring: PrefetchRing
    balance: Balance
    host: HostAttention | None  # None: everything comes over the link
    resident: Store | None  # of the first layers
    resident_layers: int
    near: Callable[[int], Store]  # makes a store on the device for so many tokens
    pages: Tensor  # [layers - resident_layers, pages, numbers] in host memory
    open: Tensor  # [layers - resident_layers, 2, numbers] on the device: a page's slot is its number's parity
