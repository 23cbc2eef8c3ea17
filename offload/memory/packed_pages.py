"""Pages whose runs of 128 tokens are packed in 12 bits without loss, in host memory or on disk, and attention to them.

Pages are packed when they leave the device, and unpacked where they are written to or copied from; the native kernel
attends to them as they are, with the bits of plain ones. A page that has a run which cannot be packed stays as it is.
What a GPU does with them is in device_packed_pages.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..architecture.config import ModelShape
from ..architecture.kv_formats import packed_page_bytes
from ..kernels.native.kernel import Kernel
from ..kernels.native.kv_groups import Groups, kv_format
from ..kernels.native.packed_kv import RUN_BLOCKS, pack_call, unpack_call
from ..settings.kv_formats import PACKED_KV, PLANE_KV
from .disk_pages import DiskPages
from .host_memory import allocator, host_memory, new_pages
from .link import Link, Pair
from .page import NativePageFormat

_RUNS_AT_ONCE = 512  # unpacked where chunks are gathered


class PackedFormat(Protocol):
    """Packs and unpacks pages where it is: in host memory, or on a GPU (device_packed_pages.py)."""

    kernel: Any
    tokens: int
    numbers: int
    page_bytes: int  # of a packed page
    plain_bytes: int  # of one as it is
    runs: tuple[int, int, int]  # KV heads, runs of a head, and bytes of a run

    @property
    def host(self) -> PackedPageFormat:
        """Return the format for pages in host memory."""

    def grains(self, pages: Tensor) -> Tensor:
        """View pages as blocks, as `PageLayout.grains`."""

    def pack(self, pages: Tensor) -> tuple[Tensor, list[bool]]:
        """Return packed pages `[n, bytes]`, and which of them could be packed."""

    def unpack(self, source: Tensor, page: Tensor) -> None:
        """Unpack the bytes of a page, or copy them if they are not packed."""


class PackedPageFormat(NativePageFormat):
    """Blocks in pages as they are, of bf16; and packed ones, in bytes.

    A packed page is `[kv_heads, tokens / 128, bytes of a run]`, padded to whole pages of the system's. Plane A of one,
    with what is before it in each run, is a tensor of these three dimensions.
    """

    def __init__(self, shape: ModelShape, tokens: int, kernel: Kernel) -> None:
        super().__init__(shape, tokens, kernel)
        self.page_bytes = packed_page_bytes(shape, tokens)
        self.plain_bytes = 2 * self.numbers
        self.runs = shape.kv_heads, tokens // PACKED_KV.run, PACKED_KV.run_bytes(shape.head_dim)
        heads, count, _ = self.runs
        with torch.inference_mode(False):
            own = torch.arange(count * RUN_BLOCKS, dtype=torch.int32)
            self._table = (~own).expand(heads, -1).contiguous()
            each = torch.cartesian_prod(torch.arange(heads), torch.arange(count)).view(-1, 2)
            self._items = torch.cat((each, own.view(count, -1).repeat(heads, 1)), 1).to(torch.int32)
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
        return self._calls.partials(self.kernel, self._none, q, seen, causal, table=self._table, groups=groups)

    def drafted(self, planes: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yield what `attend` takes for planes A of pages `[n, kv_heads, runs, bytes]`, and of how many tokens."""
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
        self.kernel.pack_runs(pack_call(page.view(self._size), self.runs_of(to), self._items, fits))
        return bool(fits.all())

    def unpack(self, source: Tensor, page: Tensor) -> None:
        """Unpack the bytes of a page, or copy them if they are not packed."""
        if source.nbytes == self.plain_bytes:
            page.copy_(source.view(page.dtype))
        else:
            self.kernel.pack_runs(unpack_call(self.runs_of(source), self._items, page.view(self._size)))


class PackedPages:
    """Packed pages of a number of layers, indexed by layer and page: their bytes, or ranges of a file, to be copied."""

    def __init__(self, format: PackedFormat, stored: Tensor | DiskPages) -> None:
        """`stored` `[layers, pages, bytes]` is the memory of the packed ones."""
        self.format, self.stored, self.shape = format, stored, stored.shape
        self._plain: dict[tuple[int, int], Tensor] = {}  # pages that cannot be packed, in host memory

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, at: tuple[int, Any]) -> Any:
        """Return the bytes of a page as they travel, or a list of those of a run of pages."""
        layer, page = at
        if isinstance(page, slice):
            return [self[layer, each] for each in range(self.shape[1])[page]]
        plain = self._plain.get((layer, page))
        return self.stored[layer, page] if plain is None else plain.view(torch.uint8)

    @property
    def is_on_disk(self) -> bool:
        """Return whether some of them lie in a file."""
        return isinstance(self.stored, DiskPages)

    def targets(self, layer: int, run: slice, buffer: Tensor) -> list[Tensor]:
        """Return where the bytes of consecutive pages go in a buffer, which has room for unpacked ones."""
        return [to[: source.nbytes] for to, source in zip(buffer, self[layer, run], strict=False)]

    def copies(self, layer: int, run: slice, buffer: Tensor) -> list[Pair]:
        """Return the copies of consecutive pages to a buffer."""
        return list(zip(self.targets(layer, run, buffer), self[layer, run], strict=True))

    def arrived(self, layer: int, run: slice, buffer: Tensor) -> Iterator[Tensor]:
        """Yield the bytes of consecutive pages, whose copies to a buffer have ended."""
        numbers = range(self.shape[1])[run]
        for number, source in zip(numbers, self.targets(layer, run, buffer), strict=False):
            yield self.joined((layer, number), source)

    def joined(self, key: tuple[int, int], source: Tensor) -> Tensor:
        """Return the bytes of a page from those that travel."""
        return source

    def divided(self, key: tuple[int, int], packed: Tensor) -> Tensor:
        """Return the bytes of a packed page that travel."""
        return packed

    def unpacked(self, layer: int, run: slice, buffer: Tensor) -> Tensor:
        """Return the pages `[n, numbers]` whose bytes have arrived in a buffer."""
        pages = new_pages((len(buffer), self.format.numbers), torch.bfloat16, buffer.device)
        for source, page in zip(self.arrived(layer, run, buffer), pages, strict=True):
            self.format.unpack(source, page)
        return pages

    def writes(self, keys: Sequence[tuple[int, int]], pages: Tensor) -> list[Pair]:
        """Pack pages `[n, numbers]`, and return the copies that store them; `keys` are their layers and numbers."""
        pairs: list[Any] = []
        for key, page, packed, fits in zip(keys, pages, *self.format.pack(pages), strict=True):
            moved = self.divided(key, packed)
            if fits:
                self._plain.pop(key, None)
                pairs.append((self.stored[key], moved))
            else:
                self._plain[key] = allocator(pages.device)(tuple(page.shape), page.dtype)
                pairs.append((self._plain[key], page))
        return pairs

    def read(
        self,
        keys: Sequence[tuple[int, int]],
        pages: Tensor,
        link: Link | None,
        format: PackedFormat | None = None,
    ) -> None:
        """Unpack pages to `pages` `[n, numbers]`, after they came over the link if there is one; wait for it.

        `format`: that of where `pages` are, without it the device's. Raises TransferFailed.
        """
        sources = [self[key] for key in keys]
        if link is not None:
            arrived = [new_pages((source.nbytes,), torch.uint8, pages.device) for source in sources]
            link.wait(ticket := link.copy(list(zip(arrived, sources, strict=True)), link.mark()))
            link.finish(ticket)
            sources = arrived
        for key, source, page in zip(keys, sources, pages, strict=True):
            (format or self.format).unpack(self.joined(key, source), page)

    def read_grains(self, link: Link, layer: Tensor, page: Tensor, head: Tensor, grain: Tensor) -> Tensor:
        """Return blocks of pages `[n * count, ...]` in host memory; all indices are `[n, count]`.

        Raises TransferFailed.
        """
        heads, runs, _ = self.format.runs
        layer, page, head, grain = (x.flatten() for x in (layer, page, head, grain))
        numbers = ((layer * self.shape[1] + page) * heads + head) * runs + grain // RUN_BLOCKS
        unique, order = numbers.unique(return_inverse=True)
        picked = torch.empty((len(order), self.format.numbers // (heads * runs * RUN_BLOCKS)), dtype=torch.bfloat16)
        for start in range(0, len(unique), _RUNS_AT_ONCE):
            blocks = self._blocks_of(unique[start : start + _RUNS_AT_ONCE], link)
            own = ((order >= start) & (order < start + _RUNS_AT_ONCE)).nonzero().squeeze(1)
            picked[own] = blocks[(order[own] - start) * RUN_BLOCKS + grain[own] % RUN_BLOCKS]
        for key, plain in self._plain.items():
            own = ((layer == key[0]) & (page == key[1])).nonzero().squeeze(1)
            picked[own] = self.format.grains(plain)[head[own], grain[own]]
        return picked

    def _blocks_of(self, numbers: Tensor, link: Link) -> Tensor:
        """Return the blocks `[n * 8, ...]` of packed runs, which are numbered through all pages."""
        heads, runs, nbytes = self.format.runs
        pages, at = numbers // (heads * runs), numbers % (heads * runs)
        if isinstance(self.stored, DiskPages):
            memory = torch.empty((1, len(numbers), nbytes), dtype=torch.uint8)
            places = zip((pages // self.shape[1]).tolist(), (pages % self.shape[1]).tolist(), at.tolist(), strict=True)
            sources: list[Any] = [self.stored.part(layer, page, run * nbytes, nbytes) for layer, page, run in places]
            link.wait(link.copy(list(zip(memory[0], sources, strict=True))))
        else:
            memory = self.runs_at(pages, at).unsqueeze(0)
        own = torch.arange(len(numbers) * RUN_BLOCKS).view(-1, RUN_BLOCKS)
        first = torch.stack((torch.zeros_like(numbers), torch.arange(len(numbers))), 1)
        size = (1, own.numel(), self.format.numbers // (heads * runs * RUN_BLOCKS))
        blocks = torch.empty(size, dtype=torch.bfloat16)
        items = torch.cat((first, own), 1).to(torch.int32)
        self.format.kernel.pack_runs(unpack_call(memory, items, blocks))
        return blocks[0]

    def runs_at(self, pages: Tensor, at: Tensor) -> Tensor:
        """Return runs `[n, bytes]` in host memory: their pages, numbered through all layers, and where in them."""
        heads, runs, nbytes = self.format.runs
        assert isinstance(self.stored, Tensor)
        return self.stored.flatten(0, 1)[:, : heads * runs * nbytes].unflatten(1, (-1, nbytes))[pages, at]


def page_writes(pages: Tensor | DiskPages | PackedPages, layer: int, first: int, source: Tensor) -> list[Any]:
    """Return the copies that store a layer's pages `[n, numbers]` from number `first` on."""
    if isinstance(pages, PackedPages):
        return pages.writes([(layer, first + at) for at in range(len(source))], source)
    return [(pages[layer, first : first + len(source)], source)]
