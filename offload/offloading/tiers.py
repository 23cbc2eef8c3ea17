"""What a tiered store is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..kv_cache.store import Store
from .balance import Balance
from .host_attention import HostAttention
from .link import Link
from .page import Form
from .prefetch import Ring


@dataclass
class Tiers:
    """What a tiered store is made of."""

    form: Form
    link: Link
    ring: Ring
    balance: Balance
    host: HostAttention | None  # None: everything comes over the link
    resident: Store | None  # of the first layers
    resident_layers: int
    near: Callable[[int], Store]  # makes a store on the device for so many tokens
    pieces: Tensor  # [layers - resident_layers, pieces, numbers] in host memory
    open: Tensor  # [layers - resident_layers, 2, numbers] on the device: a piece's slot is its number's parity
