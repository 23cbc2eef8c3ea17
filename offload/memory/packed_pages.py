"""Pages whose keys and values are packed in 12 bits without loss, outside the device, and attention to them.

128 tokens of a head are packed together. Pages are packed when they leave the device, and unpacked where they are
written to or copied from; the native kernel attends to them as they are, with the bits of plain ones. A page that
cannot be packed stays as it is. A GPU's part is in device_packed_pages.py.

Divided in two planes, plane A, 8 of the 12 bits, stays on the device, and B is streamed. A draft attends to plane A of
all whole pages. A verification joins both, page by page as B arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import packed_page_bytes
from ..kernels.native.kernel import Kernel
from ..kernels.native.kv_groups import Groups, kv_format
from ..kernels.native.packed_kv import RUN_BLOCKS, pack_call, unpack_call
from ..settings.kv_formats import PACKED_KV, PLANE_KV
from .disk_link import FileRange
from .host_memory import allocator, host_memory, new_pages
from .link import Link, Pair, copy_now
from .page import NativePageFormat
from .pages import Pages

if TYPE_CHECKING:
    from .device_packed_pages import DevicePackedPageFormat

_RUNS_AT_ONCE = 512  # unpacked where chunks are gathered


class PackedPageFormat(NativePageFormat):
    """Blocks in pages as they are, of bf16; and packed ones, in bytes.

    A packed page is `[kv_heads, tokens / 128, bytes of a run]`, padded to whole pages of the system's. Plane A of one,
    with what is before it in each run, is a tensor of these three dimensions.

    Attributes:
        page_bytes, plain_bytes: of a packed page, and of one as it is.
        runs: KV heads, runs of 128 tokens of a head, and bytes of a run.
    """

    kernel: Kernel

    def __init__(self, shape: ModelShape, tokens: int, kernel: Kernel) -> None:
        super().__init__(shape, tokens, kernel)
        self.page_bytes = packed_page_bytes(shape, tokens)
        self.plain_bytes = 2 * self.numbers
        self.runs = shape.kv_heads, tokens // PACKED_KV.run, PACKED_KV.run_bytes(shape.head_dim)
        heads, count, _ = self.runs
        with torch.inference_mode(False):
            blocks = torch.arange(count * RUN_BLOCKS, dtype=torch.int32)
            self._table = (~blocks).expand(heads, -1).contiguous()
            numbers = torch.cartesian_prod(torch.arange(heads), torch.arange(count)).view(-1, 2)
            self._items = torch.cat((numbers, blocks.view(count, -1).repeat(heads, 1)), 1).to(torch.int32)
            self._none = torch.empty((heads, 1, self._size[2]), dtype=torch.bfloat16)

    @property
    def host(self) -> PackedPageFormat:
        return self

    def attend(self, page: Tensor, q: Tensor, seen: int, causal: bool = False) -> Tensor:
        if page.dtype != torch.uint8:
            return super().attend(page, q, seen, causal)
        if page.nbytes == self.plain_bytes:
            return super().attend(page.view(torch.bfloat16), q, seen, causal)
        is_plane = page.dim() > 1
        memory, format = (page, PLANE_KV) if is_plane else (self.runs_of(page), PACKED_KV)
        groups = Groups(memory, kv_format(format.name))
        return self._calls.partials(self._native, self._none, q, seen, causal, table=self._table, groups=groups)

    def drafted(self, planes: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yield arguments of `attend` for planes A of pages `[n, kv_heads, runs, bytes]`, and their tokens."""
        return ((page, self.tokens) for page in planes)

    def runs_of(self, page: Tensor) -> Tensor:
        """View a packed page as `[kv_heads, runs, bytes]`."""
        heads, count, nbytes = self.runs
        return page[: heads * count * nbytes].view(self.runs)

    def pack(self, pages: Tensor) -> tuple[Tensor, list[bool]]:
        """Return packed pages `[n, bytes]`, and which of them could be packed."""
        packed = host_memory((len(pages), self.page_bytes), torch.uint8)
        return packed, [self._pack(*both) for both in zip(pages, packed, strict=True)]

    def _pack(self, page: Tensor, to: Tensor) -> bool:
        fits = torch.empty(len(self._items), dtype=torch.uint8)
        self._native.pack_runs(pack_call(page.view(self._size), self.runs_of(to), self._items, fits))
        return bool(fits.all())

    def plain(self, arrived: Tensor) -> Tensor:
        page = torch.empty(self.numbers, dtype=torch.bfloat16)
        self.unpack(arrived, page)
        return page

    def unpack(self, source: Tensor, page: Tensor) -> None:
        """Unpack the bytes of a page, or copy them if they are not packed."""
        if source.nbytes == self.plain_bytes:
            page.copy_(source.view(page.dtype))
        else:
            self._native.pack_runs(unpack_call(self.runs_of(source), self._items, page.view(self._size)))


class PackedPages(Pages):
    """Packed pages `[layers, pages, bytes]`. What travels is their bytes, or those of a page that cannot be packed."""

    layout: PackedPageFormat | DevicePackedPageFormat

    def __init__(self, layout: PackedPageFormat | DevicePackedPageFormat, *pages: Any) -> None:
        super().__init__(layout, *pages)
        self._plain: dict[tuple[int, int], Tensor] = {}  # pages that cannot be packed, in host memory

    @property
    def is_writable(self) -> bool:
        return False

    @property
    def read_cost(self) -> float:
        return super().read_cost * self.shape[2] / self.layout.plain_bytes

    def _bytes_of(self, layer: int, page: int) -> Any:
        """Return the bytes of a page as they travel, or their range of the file."""
        plain = self._plain.get((layer, page))
        return self.part(layer, page, 0, self.shape[2]) if plain is None else plain.view(torch.uint8)

    def for_host(self, layer: int, pages: slice) -> list[Tensor]:
        return [self._bytes_of(layer, page) for page in range(pages.start, pages.stop)]

    def copies(self, layer: int, pages: slice, buffer: Tensor) -> list[Pair]:
        """Return copies as `Pages` does; the buffer has room for pages as they are."""
        sources = self.for_host(layer, pages)
        return [(to[: source.nbytes], source) for to, source in zip(buffer, sources, strict=False)]

    def arrived(self, layer: int, pages: slice, buffer: Tensor) -> Iterable[Tensor]:
        for page, to in zip(range(pages.start, pages.stop), buffer, strict=False):
            yield self.joined(layer, page, to[: self._bytes_of(layer, page).nbytes])

    def joined(self, layer: int, page: int, source: Tensor) -> Tensor:
        """Return the bytes of a page from those that travel."""
        return source

    def divided(self, layer: int, page: int, packed: Tensor) -> Tensor:
        """Return the bytes of a packed page that travel."""
        return packed

    def writes(self, layers: range, first: int, pages: Tensor) -> list[Pair]:
        """Pack pages, and return the copies that store them."""
        pairs: list[Pair] = []
        keys = ((layer, first + at) for layer in layers for at in range(pages.shape[1]))
        each = pages.flatten(0, 1)
        for key, page, packed, fits in zip(keys, each, *self.layout.pack(each), strict=True):
            moved = self.divided(*key, packed)
            if fits:
                self._plain.pop(key, None)
                pairs.append((self._bytes_of(*key), moved))
            else:
                self._plain[key] = allocator(pages.device)(tuple(page.shape), page.dtype)
                pairs.append((self._plain[key], page))
        return pairs

    def read(self, layers: range, page: int, target: Tensor, link: Link) -> None:
        """Unpack a page of some layers to `target` `[layers, numbers]`, after its bytes have come over the link."""
        sources = [self._bytes_of(layer, page) for layer in layers]
        arrived = [new_pages((source.nbytes,), torch.uint8, target.device) for source in sources]
        copy_now(link, list(zip(arrived, sources, strict=True)))
        for layer, source, to in zip(layers, arrived, target, strict=True):
            self.layout.unpack(self.joined(layer, page, source), to)

    def on_host(self, layers: range, page: int, link: Link) -> Tensor:
        host = self.layout.host
        memory = host_memory((len(layers), host.numbers), torch.bfloat16)
        for layer, to in zip(layers, memory, strict=True):
            source = self._bytes_of(layer, page)
            if isinstance(source, FileRange):
                link.wait(link.copy([(found := host_memory((source.nbytes,), torch.uint8), source)]))
                source = found
            host.unpack(self.joined(layer, page, source), to)
        return memory

    def gather(self, layer: Tensor, page: Tensor, head: Tensor, at: Tensor, link: Link) -> Tensor:
        heads, runs, _ = self.layout.runs
        numbers = ((layer * self.shape[1] + page) * heads + head) * runs + at // RUN_BLOCKS
        unique, order = numbers.unique(return_inverse=True)
        picked = torch.empty((len(order), self._block_size), dtype=torch.bfloat16)
        for start in range(0, len(unique), _RUNS_AT_ONCE):
            blocks = self._blocks_of(unique[start : start + _RUNS_AT_ONCE], link)
            own = ((order >= start) & (order < start + _RUNS_AT_ONCE)).nonzero().squeeze(1)
            picked[own] = blocks[(order[own] - start) * RUN_BLOCKS + at[own] % RUN_BLOCKS]
        for key, plain in self._plain.items():
            own = ((layer == key[0]) & (page == key[1])).nonzero().squeeze(1)
            picked[own] = self.layout.parts(plain)[head[own], at[own]]
        return picked

    @property
    def _block_size(self) -> int:
        heads, runs, _ = self.layout.runs
        return self.layout.numbers // (heads * runs * RUN_BLOCKS)

    def _blocks_of(self, numbers: Tensor, link: Link) -> Tensor:
        """Return the blocks `[n * 8, ...]` of packed runs, which are numbered through all pages."""
        heads, runs, nbytes = self.layout.runs
        pages, at = numbers // (heads * runs), numbers % (heads * runs)
        if self.file is None:
            memory = self.runs_at(pages, at)
        else:
            memory = torch.empty((len(numbers), nbytes), dtype=torch.uint8)
            layers, own = pages // self.shape[1], pages % self.shape[1]
            where = zip(layers.tolist(), own.tolist(), at.tolist(), strict=True)
            sources = [self.part(layer, page, run * nbytes, nbytes) for layer, page, run in where]
            link.wait(link.copy(list(zip(memory, sources, strict=True))))
        blocks = torch.empty((1, len(numbers) * RUN_BLOCKS, self._block_size), dtype=torch.bfloat16)
        targets = torch.arange(blocks.shape[1]).view(-1, RUN_BLOCKS)
        first = torch.stack((torch.zeros_like(numbers), torch.arange(len(numbers))), 1)
        items = torch.cat((first, targets), 1).to(torch.int32)
        self.layout.host.kernel.pack_runs(unpack_call(memory.unsqueeze(0), items, blocks))
        return blocks[0]

    def runs_at(self, pages: Tensor, at: Tensor) -> Tensor:
        """Return runs `[n, bytes]` in host memory, by their pages, numbered through all layers, and `at` in them."""
        heads, runs, nbytes = self.layout.runs
        assert self.memory is not None
        return self.memory.flatten(0, 1)[:, : heads * runs * nbytes].unflatten(1, (-1, nbytes))[pages, at]


def plane_b_bytes(format: PackedPageFormat | DevicePackedPageFormat, head_dim: int) -> int:
    """Return the bytes of a page's plane B."""
    heads, runs, nbytes = format.runs
    return heads * runs * (nbytes - PLANE_KV.run_bytes(head_dim))


class PlanePages(PackedPages):
    """Packed pages whose planes A are on the device; what travels is plane B.

    A page that cannot be packed travels as it is. Its plane A lacks a few numbers, and is a draft like others.
    """

    def __init__(self, layout: PackedPageFormat | DevicePackedPageFormat, *pages: Any) -> None:
        super().__init__(layout, *pages)
        heads, runs, nbytes = layout.runs
        self._run_bytes = nbytes - self.shape[2] // (heads * runs)  # of plane A, with what is before the planes
        size = (*self.shape[:2], heads, runs, self._run_bytes)
        self.planes = new_pages(size, torch.uint8, self._device)
        self._scratch: dict[torch.device, Tensor] = {}  # what pages are joined in: those read last

    def joined(self, layer: int, page: int, source: Tensor) -> Tensor:
        if source.nbytes == self.layout.plain_bytes:
            return source
        return self._whole(self.planes[layer, page].unsqueeze(0), source.unsqueeze(0)).flatten()

    def arrived(self, layer: int, pages: slice, buffer: Tensor) -> Iterable[Tensor]:
        """Yield pages as `PackedPages.arrived`; each is valid until the next one, or that of another call."""
        numbers = range(pages.start, pages.stop)
        if buffer.device.type == "cpu" or any((layer, number) in self._plain for number in numbers):
            yield from super().arrived(layer, pages, buffer)  # one by one, in a processor's cache
        else:  # in few launches
            yield from self._whole(self.planes[layer, pages], buffer[: len(numbers), : self.shape[2]]).flatten(1)

    def _whole(self, planes: Tensor, rest: Tensor) -> Tensor:
        """Return packed pages `[n, kv_heads, runs, bytes]` from their planes A and B, in memory that is used again."""
        if len(self._scratch.get(rest.device, ())) < len(rest):
            self._scratch[rest.device] = new_pages((len(rest), *self.layout.runs), torch.uint8, rest.device)
        whole = self._scratch[rest.device][: len(rest)]
        whole[..., : self._run_bytes] = planes
        whole[..., self._run_bytes :] = rest.unflatten(1, (*whole.shape[1:3], -1))
        return whole

    def divided(self, layer: int, page: int, packed: Tensor) -> Tensor:
        planes = self.planes[layer, page]
        runs = packed[: self.shape[2] + planes.nbytes].view(self.layout.runs)
        planes.copy_(runs[..., : self._run_bytes])
        return runs[..., self._run_bytes :].flatten()

    def runs_at(self, pages: Tensor, at: Tensor) -> Tensor:
        heads, runs, _ = self.layout.runs
        assert self.memory is not None
        first = self.planes.flatten(0, 1).flatten(1, 2)[pages.to(self._device), at.to(self._device)]
        rest = self.memory.flatten(0, 1).unflatten(1, (heads * runs, -1))[pages, at]
        return torch.cat((first.cpu(), rest), dim=1)
