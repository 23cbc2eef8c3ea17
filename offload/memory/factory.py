"""Makes the store that fits a backend, and builds tiered ones from settings."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.pages import SLOTS, page_tokens
from ..errors import SettingsError
from ..kernels.native import Kernel, KernelUnavailable, find_kernel
from ..kernels.native.ops import why_not
from ..kernels.ops import Operations
from ..settings.kv_formats import BF16, KV_FORMATS, PACKED_KV, PLAIN_KV, KVFormat
from ..settings.placement_settings import PLANES, STREAMED
from ..settings.validation import require
from ..system.scratch_file import ScratchFile
from .block_store import BlockStore
from .device_packed_pages import DevicePackedPageFormat
from .disk_link import DiskLink, StagedLink
from .host_attention import HOST_ROWS, Balance, HostAttention
from .host_memory import Pinning, allocator, begin_allocation, new_pages
from .link import DISK_COST, LINK_COST, Link, SimulatedLink
from .open_pages import OpenPages
from .packed_pages import PackedPageFormat, PackedPages, PlanePages, plane_b_bytes
from .page import BlockPageFormat, NativePageFormat, PageLayout
from .pages import Pages
from .plain_store import PlainStore
from .prefetch import PrefetchRing
from .quantized_groups import GroupTiers, QuantizedPageFormat
from .store import DeviceStore, Store
from .tier_settings import HOST_SHARES, TierSettings
from .tiered_store import TieredStore
from .tiers import Tiers

# A store is a format of pages in a placement. The formats, by what attends to pages on the device: the native kernel,
# or a GPU or torch with the native kernel on the host, if there is one. Quantised pages have one format for both.
_PAGES: dict[tuple[KVFormat, str], Callable[[ModelShape, int, Any, torch.device], PageLayout]] = {
    (PLAIN_KV, "native"): lambda shape, page, kernel, device: NativePageFormat(shape, page, kernel),
    (PLAIN_KV, "gpu"): lambda shape, page, kernel, device: BlockPageFormat(shape, page, kernel),
    (PACKED_KV, "native"): lambda shape, page, kernel, device: PackedPageFormat(shape, page, kernel),
    (PACKED_KV, "gpu"): lambda shape, page, kernel, device: DevicePackedPageFormat(
        PackedPageFormat(shape, page, kernel), shape, device
    ),
}


class _Sizes(NamedTuple):
    """What pages take: their format, the type of its numbers, and size and type of what is stored of them."""

    format: Any
    numbers: torch.dtype
    stored: tuple[int, int, int]  # layers, pages, numbers
    dtype: torch.dtype


def new_store(
    kernel: Kernel | None,
    shape: ModelShape,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device,
    kv: str = BF16,
    tiers: GroupTiers | None = None,
) -> Store:
    """Return an empty store for a sequence of up to `capacity` tokens, all in one memory.

    `kv` is their format. A quantised one needs the native kernel or Triton's, and may lie over `tiers`. Packed ones are
    as they are in a CPU's own memory, where nothing travels.
    """
    format = KV_FORMATS[kv]
    if format is PLAIN_KV or (format is PACKED_KV and kernel is not None):
        return new_device_store(kernel, shape, capacity, dtype, device)
    store, own = format.store(kernel is not None), (shape, capacity, dtype)
    return store(*own, device, kv, tiers) if kernel is None else store(kernel, *own, kv, tiers)


def new_device_store(
    kernel: Kernel | None, shape: ModelShape, capacity: int, dtype: torch.dtype, device: torch.device
) -> DeviceStore:
    """Return such a store of keys and values as they are."""
    if kernel is not None and not shape.caps_scores:
        return BlockStore(kernel, shape, capacity, dtype)
    return PlainStore(shape, capacity, dtype, device, by_row=kernel is not None)


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
        kv: the format of keys and values; with quantised ones, prompts are read chunk by chunk.
    """

    def __init__(
        self,
        operations: Operations,
        device: torch.device,
        settings: TierSettings,
        link: Link | None = None,
        new_file: Callable[[Path, int], ScratchFile] = ScratchFile,
        kv: str = BF16,
    ) -> None:
        self._new_file, self._format = new_file, KV_FORMATS[kv]
        self.settings = replace(settings, by_layers=False) if self._format.lossy else settings
        self.link = link or make_link(device, settings.link_gb_s, settings.disk is not None)
        self._operations, self._device = operations, device
        self._reserved: tuple[Tensor, Pinning | None] | None = None  # pages for the next store

    def read_cost(self, shape: ModelShape) -> float:
        """Return the estimated time to read a byte of a store's KV, relative to the device's memory."""
        if self.settings.resident_layers >= shape.kv_layers:
            return 1.0
        return LINK_COST if self.settings.disk is None else DISK_COST

    def describe(self, shape: ModelShape) -> str:
        """Return as text, with a comma before it, what is not on the device; "" if all is."""
        settings = self.settings
        where = "" if settings.experts == "device" else ", experts in host memory"
        if settings.resident_layers >= shape.kv_layers and settings.weight_layers is None:
            return where
        return f"{where}, KV offloaded ({settings.mode if settings.disk is None else 'disk'})"

    def reserve(self, shape: ModelShape, capacity: int, dtype: torch.dtype) -> None:
        """Begin to pin host memory for a store of such a capacity, while something else is done."""
        shape = shape.full_attention
        layers = shape.layers - self.settings.resident_layers
        if layers > 0:
            layers = layers if self.settings.disk is None else min(self.settings.host_layers, layers)
            sizes = self._sizes(replace(shape, layers=layers), capacity, dtype)
            self._reserved = begin_allocation(sizes.stored, sizes.dtype, self._device)

    @torch.inference_mode(False)
    def new_store(self, shape: ModelShape, capacity: int, dtype: torch.dtype) -> Store:
        """Return an empty store for a sequence of up to `capacity` tokens: of the layers that attend to all of them.

        Raises SettingsError for a model whose attention the tiers do not compute.
        """
        check_model(shape)
        visits, shape = 1 + shape.borrowing[0], shape.full_attention
        resident = min(self.settings.resident_layers, shape.layers)
        kernel, device = self._operations.kernel, self._device
        kv = self._format.name if self._format.lossy else BF16  # of the resident layers
        if resident == shape.layers:
            return new_store(kernel, shape, capacity, dtype, device, kv)
        tiers = self._tiers(replace(shape, layers=shape.layers - resident), capacity, dtype, visits)
        if self._format.lossy:
            return new_store(kernel, shape, capacity, dtype, device, kv, tiers)
        new = partial(new_device_store, kernel, dtype=dtype, device=device)
        first = new(replace(shape, layers=resident), capacity) if resident else None
        return TieredStore(shape, dtype, tiers, first, new)

    def _tiers(self, shape: ModelShape, capacity: int, dtype: torch.dtype, visits: int) -> Tiers[Any]:
        """Return tiers with memory for a store's pages."""
        settings, device, sizes = self.settings, self._device, self._sizes(shape, capacity, dtype)
        format = sizes.format
        page_bytes = format.numbers * sizes.numbers.itemsize
        pages, pinning = self._pages(sizes)
        count, together = settings.buffers_for(page_bytes, sizes.stored[1])
        buffers = new_pages((count, together, page_bytes // sizes.dtype.itemsize), sizes.dtype, device).unbind()
        slots = new_pages((shape.layers, SLOTS, format.numbers), sizes.numbers, device)
        share = HOST_SHARES[settings.mode] if settings.share is None else settings.share
        return Tiers(
            format=format,
            link=self.link,
            ring=PrefetchRing(self.link, buffers),
            together=together,
            balance=Balance(share, HOST_ROWS if device.type == "cuda" else float("inf")),
            host=None if settings.mode in STREAMED else self._host(format),
            pages=pages,
            open_pages=OpenPages(slots, pages, self.link, format.tokens),
            pinning=pinning,
            last_visits=visits,
        )

    def _host(self, format: PageLayout) -> HostAttention:
        sums = self._format is not PLAIN_KV and self._operations.kernel is None
        return HostAttention(format, self._device, sums)

    def _stored_format(self, shape: ModelShape, dtype: torch.dtype) -> tuple[Any, torch.dtype]:
        """Return the format of pages and the type of their numbers: the kernel's blocks where it attends to them."""
        page, kernel = self.settings.page_tokens or page_tokens(shape, dtype.itemsize), self._operations.kernel
        looks = kernel is None and (self._device.type != "cpu" or self._format is not PLAIN_KV)
        on_host = host_kernel(shape, dtype) if looks else kernel
        if self._format.lossy:
            return QuantizedPageFormat(shape, page, self._format.name, on_host), torch.uint8
        reader = "gpu" if kernel is None else "native"
        return _PAGES[self._format, reader](shape, page, on_host, self._device), dtype

    def _sizes(self, shape: ModelShape, capacity: int, dtype: torch.dtype) -> _Sizes:
        format, numbers = self._stored_format(shape, dtype)
        stored, count = format.numbers, -(-capacity // format.tokens)
        if self._format is PACKED_KV:
            stored = plane_b_bytes(format, shape.head_dim) if self.settings.mode == PLANES else format.page_bytes
            return _Sizes(format, numbers, (shape.layers, count, stored), torch.uint8)
        return _Sizes(format, numbers, (shape.layers, count, stored), numbers)

    def _pages(self, sizes: _Sizes) -> tuple[Pages, Pinning | None]:
        """Return pages in host memory, the reserved one if it is of that size, or in a file."""
        kind = Pages if self._format is not PACKED_KV else PlanePages if self.settings.mode == PLANES else PackedPages
        layers, *page = sizes.stored
        if self.settings.disk is None:
            memory, pinning = self._host_memory(sizes.stored, sizes.dtype)
            return kind(sizes.format, sizes.stored, self._device, memory), pinning
        host = min(self.settings.host_layers, layers)
        nothing: tuple[Tensor | None, Pinning | None] = None, None
        in_memory, pinning = self._host_memory((host, *page), sizes.dtype) if host else nothing
        nbytes = torch.Size((layers - host, *page)).numel() * sizes.dtype.itemsize
        file = self._new_file(self.settings.disk, nbytes)
        return kind(sizes.format, sizes.stored, self._device, in_memory, file, sizes.dtype), pinning

    def _host_memory(self, size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Pinning | None]:
        """Return host memory for pages, the reserved one if it is of that size."""
        reserved, self._reserved = self._reserved, None
        if reserved is not None and (reserved[0].shape, reserved[0].dtype) == (size, dtype):
            return reserved
        del reserved  # free it first
        return begin_allocation(size, dtype, self._device)


def host_kernel(shape: ModelShape, dtype: torch.dtype) -> Kernel | None:
    """Return the native kernel that attends on the host of a GPU, or None."""
    if why_not(shape, dtype, torch.device("cpu")) is None:
        with contextlib.suppress(KernelUnavailable):
            return find_kernel()
    return None


def make_link(device: torch.device, gb_s: float | None = None, to_disk: bool = False) -> Link:
    """Return a simulated link of `gb_s` 10^9 bytes/s, or if None the device's own; a CPU has one to the disk only.

    `to_disk`: pages may lie on disk, too. Raises SettingsError for a CPU alone.
    """
    if to_disk and device.type == "cpu" and gb_s is None:
        return DiskLink()
    if to_disk:
        return StagedLink(make_link(device, gb_s), device, allocator(device))
    if gb_s is not None:
        return SimulatedLink(gb_s * 1e9)
    hint = "give the rate of a simulated one, such as link_gb_s=25, or a folder on disk"
    require(device.type == "cuda", f"a {device.type} has no link to offload keys and values over", hint)
    from .cuda_link import CudaLink

    return CudaLink(device)
