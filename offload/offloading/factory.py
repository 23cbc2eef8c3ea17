"""Builds tiered stores from settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.footprint import page_tokens
from ..architecture.tier_footprint import disk_buffers
from ..config import EXACT
from ..errors import SettingsError
from ..kernels.native import KernelUnavailable, find_kernel
from ..kernels.native.ops import why_not
from ..kernels.ops import Operations
from ..kv_cache.block_store import host_memory
from ..kv_cache.factory import new_store
from ..kv_cache.store import Store
from ..scratch_file import ALIGNMENT, ScratchFile
from .balance import HOST_ROWS, Balance
from .disk_pages import DiskPages
from .host_attention import HostAttention, HostThread
from .host_memory import begin_allocation, make_link
from .link import Link
from .page import BlockPageFormat, NativePageFormat, PageFormat, PlainPageFormat
from .pinning import Pinning
from .prefetch import PrefetchRing
from .quantized_pages import QuantizedPageFormat
from .quantized_store import QuantizedTieredStore
from .store import TieredStore
from .tiers import QuantizedTiers, Tiers

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
        disk: a folder; pages of layers that are not resident lie in a file there instead of host memory. On a CPU.
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
    disk: Path | None = None

    def buffers_for(self, page_bytes: int) -> int:
        """Return how many pages of so many bytes are prefetched."""
        return self.buffers if self.disk is None else max(self.buffers, disk_buffers(page_bytes))


def check_model(shape: ModelShape) -> None:
    """Raise SettingsError for a model whose keys and values cannot be offloaded."""
    if shape.caps_scores:
        raise SettingsError(
            f"the KV cache of {shape.family} cannot be offloaded: the model caps attention scores",
            "use --offload none, and a shorter prompt if it does not fit",
        )


class TieredStoreFactory:
    """Makes stores for a model whose KV does not all stay on the device. They share one link.

    Args:
        operations: the model's operations, for the resident layers.
        link: None for a simulated link of `settings.link_gb_s`, the device's own, or that to the disk.
        new_file: makes the file on disk, from the arguments of ScratchFile.
        kv: the format of keys and values; quantised ones are on a CPU, and prompts are read chunk by chunk.
    """

    def __init__(
        self,
        operations: Operations,
        device: torch.device,
        settings: TierSettings,
        link: Link | None = None,
        new_file: Callable[[Path, int, bool], ScratchFile] = ScratchFile,
        kv: str = EXACT,
    ) -> None:
        assert kv == EXACT or device.type == "cpu", "a combination that does not run"
        assert settings.disk is None or settings.mode == "stream", "pages on disk are streamed"
        self.settings = settings if kv == EXACT else replace(settings, by_layers=False)
        self._new_file, self._kv = new_file, kv
        self.link = link or make_link(device, settings.link_gb_s, settings.disk is not None)
        self._operations, self._device = operations, device
        self._reserved: tuple[Tensor, Pinning | None] | None = None  # pages for the next store

    def reserve(self, shape: ModelShape, capacity: int, dtype: torch.dtype) -> None:
        """Begin to pin host memory for a store of such a capacity, while something else is done."""
        shape = shape.full_attention
        if self.settings.resident_layers < shape.layers:
            size = self._pages_size(shape, capacity, self._page_format(shape, dtype))
            self._reserved = begin_allocation(size, dtype, self._device)

    def new_store(self, shape: ModelShape, capacity: int, dtype: torch.dtype) -> Store:
        """Return an empty store for a sequence of up to `capacity` tokens: of the layers that attend to all of them.

        Raises SettingsError for a model whose attention the tiers do not compute.
        """
        check_model(shape)
        visits, shape = 1 + shape.borrowing[0], shape.full_attention
        settings, device = self.settings, self._device
        if settings.resident_layers >= shape.layers:
            return new_store(self._operations.kernel, shape, capacity, dtype, device, self._kv)
        if self._kv != EXACT:
            return self._new_quantized_store(shape, capacity, dtype, visits)
        format = self._page_format(shape, dtype)
        resident_layers = settings.resident_layers
        away = shape.layers - resident_layers
        pages, pinning = self._pages(self._pages_size(shape, capacity, format), dtype)
        count = settings.buffers_for(format.numbers * dtype.itemsize)
        resident = None
        if resident_layers:
            resident = new_store(
                self._operations.kernel, replace(shape, layers=resident_layers), capacity, dtype, device
            )
        with torch.inference_mode(False):
            buffers = self._device_pages((count, format.numbers), dtype).unbind()
            tiers = Tiers(
                format=format,
                link=self.link,
                ring=PrefetchRing(self.link, buffers, settings.overlap),
                balance=Balance(self._share, HOST_ROWS if device.type == "cuda" else float("inf")),
                host=None if settings.mode == "stream" else HostAttention(format, device, settings.host_bandwidth),
                resident=resident,
                resident_layers=resident_layers,
                near=lambda tokens: new_store(self._operations.kernel, shape, tokens, dtype, device),
                pages=pages,
                open=self._device_pages((away, 2, format.numbers), dtype),
                pinning=pinning,
                last_visits=visits,
                prefills_plainly=device.type == "cuda",
            )
        return TieredStore(shape, tiers)

    def _new_quantized_store(
        self, shape: ModelShape, capacity: int, dtype: torch.dtype, visits: int
    ) -> QuantizedTieredStore:
        page = self.settings.page_tokens or page_tokens(shape, dtype.itemsize)
        format = QuantizedPageFormat(shape, page, self._kv)
        size = self._pages_size(shape, capacity, format)
        with torch.inference_mode(False):
            buffers = host_memory((self.settings.buffers_for(format.numbers), format.numbers), torch.uint8).unbind()
            tiers = QuantizedTiers(
                format=format,
                link=self.link,
                ring=PrefetchRing(self.link, buffers, self.settings.overlap),
                balance=Balance(self._share),
                host=None if self.settings.mode == "stream" else HostThread(self._device, self.settings.host_bandwidth),
                resident_layers=self.settings.resident_layers,
                pages=self._pages(size, torch.uint8)[0],
                open=host_memory((size[0], 2, format.numbers), torch.uint8),
                last_visits=visits,
            )
        return QuantizedTieredStore(self._operations.kernel, shape, capacity, dtype, tiers)

    @property
    def _share(self) -> float | None:
        """Return the host's fraction of the pages; None balances it."""
        return _HOST_SHARES[self.settings.mode] if self.settings.share is None else self.settings.share

    def _page_format(self, shape: ModelShape, dtype: torch.dtype) -> PageFormat:
        page = self.settings.page_tokens or page_tokens(shape, dtype.itemsize)
        return _page_format(shape, page, dtype, self._operations, self._device)

    def _pages_size(
        self, shape: ModelShape, capacity: int, format: PageFormat | QuantizedPageFormat
    ) -> tuple[int, int, int]:
        return shape.layers - self.settings.resident_layers, -(-capacity // format.tokens), format.numbers

    def _device_pages(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory for pages on the device, aligned for reads from disk."""
        if self.settings.disk is None:
            return torch.empty(size, dtype=dtype, device=self._device)
        return host_memory(size, dtype)

    def _pages(self, size: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor | DiskPages, Pinning | None]:
        """Return a file or host memory for pages, the reserved one if it is of that size."""
        if self.settings.disk is not None:
            nbytes = torch.Size(size).numel() * dtype.itemsize
            is_aligned = size[2] * dtype.itemsize % ALIGNMENT == 0
            return DiskPages(self._new_file(self.settings.disk, nbytes, is_aligned), size, dtype), None
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
