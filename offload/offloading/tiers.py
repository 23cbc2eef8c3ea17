"""The parts of a tiered store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..kv_cache.store import Store
from .balance import Balance
from .disk_pages import DiskPages
from .host_attention import HostAttention
from .link import Link
from .page import PageFormat
from .pinning import Pinning
from .prefetch import PrefetchRing


@dataclass
class Tiers:
    """The parts of a tiered store: page format, link, prefetch ring, host attention, and memory."""

    format: PageFormat
    link: Link
    ring: PrefetchRing
    balance: Balance
    host: HostAttention | None  # None: every page is streamed
    resident: Store | None  # KV of the first `resident_layers` layers
    resident_layers: int
    near: Callable[[int], Store]  # makes an empty store on the device for a number of tokens
    pages: Tensor | DiskPages  # [layers - resident_layers, pages, numbers] in host memory, or on disk
    open: Tensor  # [layers - resident_layers, 2, numbers] on the device; see OpenPages
    pinning: Pinning | None = None  # of `pages`, which may still be under way
    prefills_plainly: bool = False  # layer by layer, over plain keys: where pages are not what attention reads best
