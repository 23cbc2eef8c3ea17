"""Builds tiered stores from settings."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.footprint import page_tokens
from ..kernels.native import KernelUnavailable, find_kernel
from ..kernels.native.ops import why_not
from ..kernels.ops import Operations
from ..kv_cache.factory import new_store
from ..kv_cache.store import Store
from .balance import HOST_ROWS, Balance
from .host_attention import HostAttention
from .host_memory import begin_allocation, make_link
from .link import Link
from .page import BlockPageFormat, NativePageFormat, PageFormat, PlainPageFormat
from .pinning import Pinning
from .prefetch import PrefetchRing
from .store import TieredStore
from .tiers import Tiers

_HOST_SHARES = {"stream": 0.0, "host": 1.0, "hybrid": None}


@dataclass(frozen=True)
class TierSettings:
    """How the KV cache is spread over tiers of memory.

    Args:
        mode: stream, host or hybrid.
        resident_layers: layers whose KV stays on the device.
        share: the host's fraction of the pages; None balances it against the link.
        page_tokens: tokens per page; None derives it from the model's dimensions.
        buffers: pages on the device for prefetching.
        overlap: prefetch while the device computes.
        by_layers: prefill layer by layer, so that no page is read back.
        weight_layers: layers whose weights stay on the device; None for all.
        link_gb_s: simulate a link of this rate in 10^9 bytes/s, for a device that has none.
        host_bandwidth: slow host attention down to this rate in bytes/s, for experiments.
    """

    mode: str = "stream"
    resident_layers: int = 0
    share: float | None = None
    page_tokens: int | None = None
    buffers: int = 2
    overlap: bool = True
    by_layers: bool = True
    weight_layers: int | None = None
    link_gb_s: float | None = None
    host_bandwidth: float | None = None


class TieredStoreFactory:
    """Makes stores for a model whose KV does not all stay on the device. They share one link.

    Args:
        operations: the model's operations, for the resident layers.
        link: None for a simulated link of `settings.link_gb_s`, or the device's own.
    """

    def __init__(
        self, operations: Operations, device: torch.device, settings: TierSettings, link: Link | None = None
    ) -> None:
        self.settings = settings
        self.link = link or make_link(device, settings.link_gb_s)
        self._operations, self._device = operations, device
        self._reserved: tuple[Tensor, Pinning | None] | None = None  # pages for the next store

    def reserve(self, shape: ModelShape, capacity: int, dtype: torch.dtype) -> None:
        """Begin to pin host memory for a store of such a capacity, while something else is done."""
        if self.settings.resident_layers < shape.layers:
            size = self._pages_size(shape, capacity, self._page_format(shape, dtype))
            self._reserved = begin_allocation(size, dtype, self._device)

    def new_store(self, shape: ModelShape, capacity: int, dtype: torch.dtype) -> Store:
        """Return an empty store for a sequence of up to `capacity` tokens."""
        settings, device = self.settings, self._device
        if settings.resident_layers >= shape.layers:
            return new_store(self._operations.kernel, shape, capacity, dtype, device)
        format = self._page_format(shape, dtype)
        resident_layers = settings.resident_layers
        away = shape.layers - resident_layers
        pages, pinning = self._pages(self._pages_size(shape, capacity, format), dtype)
        resident = None
        if resident_layers:
            resident = new_store(
                self._operations.kernel, replace(shape, layers=resident_layers), capacity, dtype, device
            )
        with torch.inference_mode(False):
            buffers = torch.empty((settings.buffers, format.numbers), dtype=dtype, device=device).unbind()
            share = _HOST_SHARES[settings.mode] if settings.share is None else settings.share
            tiers = Tiers(
                format=format,
                link=self.link,
                ring=PrefetchRing(self.link, buffers, settings.overlap),
                balance=Balance(share, HOST_ROWS if device.type == "cuda" else float("inf")),
                host=None if settings.mode == "stream" else HostAttention(format, device, settings.host_bandwidth),
                resident=resident,
                resident_layers=resident_layers,
                near=lambda tokens: new_store(self._operations.kernel, shape, tokens, dtype, device),
                pages=pages,
                open=torch.empty((away, 2, format.numbers), dtype=dtype, device=device),
                pinning=pinning,
                prefills_plainly=device.type == "cuda",
            )
        return TieredStore(shape, tiers)

    def _page_format(self, shape: ModelShape, dtype: torch.dtype) -> PageFormat:
        page = self.settings.page_tokens or page_tokens(shape, dtype.itemsize)
        return _page_format(shape, page, dtype, self._operations, self._device)

    def _pages_size(self, shape: ModelShape, capacity: int, format: PageFormat) -> tuple[int, int, int]:
        return shape.layers - self.settings.resident_layers, -(-capacity // format.tokens), format.numbers

    def _pages(self, size: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Pinning | None]:
        """Return host memory for pages, the reserved one if it is of that size."""
        reserved, self._reserved = self._reserved, None
        if reserved is not None and (reserved[0].shape, reserved[0].dtype) == (size, dtype):
            return reserved
        del reserved  # free it first
        return begin_allocation(size, dtype, self._device)


def _page_format(
    shape: ModelShape, page: int, dtype: torch.dtype, operations: Operations, device: torch.device
) -> PageFormat:
    """Choose the native kernel's blocks wherever it can attend on the host."""
    if operations.kernel is not None:
        return NativePageFormat(shape, page, operations.kernel)
    if device.type != "cpu" and why_not(shape, dtype, torch.device("cpu")) is None:
        with contextlib.suppress(KernelUnavailable):
            return BlockPageFormat(shape, page, find_kernel())
    return PlainPageFormat(shape, page)
