"""Whole pages: where they lie outside the device, in host memory or a file, and the copies of them over a link."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..architecture.pages import GATHERED_BYTES
from ..system.scratch_file import ScratchFile
from .disk_link import FileRange
from .host_memory import allocator, host_memory
from .link import DISK_COST, LINK_COST, Link, Pair, copy_now
from .page import PageLayout
from .prefetch import PrefetchItem

SMALL_READ_BYTES = 64 * 1024  # that a disk reads in sequence in the time of one small read


class Pages:
    """Pages `[layers, pages, numbers]` of some layers: those of the first in `memory`, the others in a scratch file.

    Within the file, the pages of a layer lie one behind the other. `device` is where they are copied to.
    """

    def __init__(
        self,
        layout: PageLayout,
        size: tuple[int, int, int],
        device: torch.device,
        memory: Tensor | None,
        file: ScratchFile | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`size` is that of all pages; `memory` `[first layers, pages, numbers]` has those that are not in the file."""
        assert memory is not None or file is not None
        self.layout, self.shape, self.file, self.memory, self._device = layout, size, file, memory, device
        self.dtype = memory.dtype if memory is not None else dtype or torch.uint8
        self._memory_layers = 0 if memory is None else len(memory)
        self._page_bytes = size[2] * self.dtype.itemsize
        self._staging: Tensor | None = None  # pinned memory for gathered chunks; pinning takes long, so it is kept

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Return the bytes of pages in host memory."""
        return 0 if self.memory is None else self.memory.nbytes

    @property
    def read_cost(self) -> float:
        """Return the estimated time to read a byte in a pass, as in `Store`."""
        return LINK_COST if self.file is None else DISK_COST

    @property
    def is_writable(self) -> bool:
        """Return whether tokens can be stored in pages where they lie."""
        return self.file is None

    def stored(self, layer: int, pages: slice) -> Tensor | FileRange:
        """Return consecutive pages of a layer, `[n, numbers]` or a range of the file."""
        if self.memory is not None and layer < self._memory_layers:
            return self.memory[layer, pages]
        return self._range(layer, pages.start, 0, (pages.stop - pages.start) * self._page_bytes)

    def part(self, layer: int, page: int, start: int, size: int) -> Tensor | FileRange:
        """Return `size` bytes of a page, from its byte `start` on."""
        if self.memory is not None and layer < self._memory_layers:
            return self.memory[layer, page].view(torch.uint8)[start : start + size]
        return self._range(layer, page, start, size)

    def _range(self, layer: int, page: int, start: int, size: int) -> FileRange:
        assert self.file is not None
        first = ((layer - self._memory_layers) * self.shape[1] + page) * self._page_bytes
        return FileRange(self.file, first + start, size)

    def for_host(self, layer: int, pages: slice) -> Sequence[Tensor] | Tensor:
        """Return consecutive pages in host memory, as the layout attends to whole pages there."""
        assert self.memory is not None
        return self.memory[layer, pages]

    def copies(self, layer: int, pages: slice, buffer: Tensor) -> list[Pair]:
        """Return the copies of consecutive pages to a buffer `[at least n, numbers]`."""
        return [(buffer[: pages.stop - pages.start], self.stored(layer, pages))]

    def arrived(self, layer: int, pages: slice, buffer: Tensor) -> Iterable[Tensor]:
        """Yield consecutive pages as attention takes them; their copies to a buffer have ended."""
        return buffer[: pages.stop - pages.start]

    def writes(self, layers: range, first: int, pages: Tensor) -> list[Pair]:
        """Return the copies that store pages `[layers, n, numbers]` of some layers, from page number `first` on."""
        some = slice(first, first + pages.shape[1])
        return [(self.stored(layer, some), source) for layer, source in zip(layers, pages, strict=True)]

    def read(self, layers: range, page: int, target: Tensor, link: Link) -> None:
        """Copy a page of some layers to `target` `[layers, numbers]`, and wait for it. Raises TransferFailed."""
        one = slice(page, page + 1)
        copy_now(link, [(to, self.stored(layer, one)) for to, layer in zip(target.unsqueeze(1), layers, strict=True)])

    def on_host(self, layers: range, page: int, link: Link) -> Tensor:
        """Return a page of some layers `[layers, numbers]` in host memory, a view if it lies there.

        Raises TransferFailed.
        """
        if self.memory is not None and self.file is None:
            return self.memory[layers.start : layers.stop, page]
        memory = host_memory((len(layers), self.shape[2]), self.dtype)
        self.read(layers, page, memory, link)
        return memory

    def gather(self, layer: Tensor, page: Tensor, head: Tensor, at: Tensor, link: Link) -> Tensor:
        """Return parts of pages `[n, ...]` in host memory, as `PageLayout.parts` views them; valid until the next call.

        All indices are `[n]`. Raises TransferFailed.
        """
        heads, count, *size = self.layout.parts(torch.empty((1, 1), dtype=self.dtype).expand(1, self.shape[2])).shape[
            1:
        ]
        picked = self._staged((len(layer), *size))
        number, within = layer * self.shape[1] + page, head * count + at
        if self.memory is not None and self.file is None:
            memory = self.layout.parts(self.memory).flatten(0, 3)
            return torch.index_select(memory, 0, number * heads * count + within, out=picked)
        if self.memory is not None:
            is_near = layer < self._memory_layers
            memory = self.layout.parts(self.memory).flatten(0, 3)
            picked[is_near] = memory[number[is_near] * heads * count + within[is_near]]
        self._gather_from_file(picked, number, within, link)
        return picked

    def _gather_from_file(self, picked: Tensor, number: Tensor, within: Tensor, link: Link) -> None:
        """Read parts `[n, ...]` of pages in the file: one by one, or the whole page if many of them are wanted."""
        size, page_memory, small = picked[:1].nbytes, host_memory((1, self.shape[2]), self.dtype), []
        order = torch.argsort(number, stable=True)
        numbers, counts = torch.unique_consecutive(number[order], return_counts=True)
        for key, rows in zip(numbers.tolist(), order.split(counts.tolist()), strict=True):
            layer, page = divmod(key, self.shape[1])
            if layer < self._memory_layers:
                continue
            if len(rows) < self._page_bytes // SMALL_READ_BYTES:
                small += [(picked[row], self.part(layer, page, int(within[row]) * size, size)) for row in rows.tolist()]
            else:
                link.wait(link.copy([(page_memory, self.stored(layer, slice(page, page + 1)))]))
                picked[rows] = page_memory.view(-1, *picked.shape[1:])[within[rows]]
        if small:
            link.wait(link.copy(small))

    def _staged(self, shape: tuple[int, ...]) -> Tensor:
        """Return pinned memory that is kept, for a copy to the device: pageable memory is copied slowly."""
        nbytes = torch.Size(shape).numel() * self.dtype.itemsize
        if self._staging is None or self._staging.nbytes < nbytes:
            self._staging = None  # free it first
            self._staging = allocator(self._device)((max(nbytes, GATHERED_BYTES),), torch.uint8)
        return self._staging[:nbytes].view(self.dtype).view(shape)


class StreamedPages(PrefetchItem):
    """A copy of consecutive pages to the device; the key is their layer, and which of its pages."""

    def copies(self, buffer: Tensor) -> list[Pair]:
        return self.source.copies(*self.key, buffer)


def streamed(pages: Pages, layer: int, which: range, together: int) -> Iterator[StreamedPages]:
    """Yield copies of consecutive pages of a layer, `together` of them in each."""
    for first in range(which.start, which.stop, together):
        end = min(first + together, which.stop)
        yield StreamedPages((layer, slice(first, end)), pages, end - first)


def streamed_in_pass(pages: Pages, count: int, visits: int, last_visits: int, together: int) -> Iterator[StreamedPages]:
    """Yield the first `count` pages of each layer, in the order of a pass. It must not refer to the store.

    A pass reads the pages of a layer `visits` times, and those of the last layer for `last_visits` of the model's.
    """
    for layer in range(len(pages)):
        for _ in range(visits * (last_visits if layer == len(pages) - 1 else 1)):
            yield from streamed(pages, layer, range(count), together)
