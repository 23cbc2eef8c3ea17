"""Pages in a scratch file: where keys and values of some layers lie that have no room in memory; and reads of them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..system.scratch_file import ScratchFile
from .host_memory import host_memory
from .link import Link
from .page import PageLayout

SMALL_READ_BYTES = 64 * 1024  # that a disk reads in sequence in the time of one small read
_BATCH_BYTES = 16 * 2**20  # of pages in memory at once


@dataclass(frozen=True, slots=True)
class FileRange:
    """A run of bytes of a file, as the source or the target of a copy."""

    file: ScratchFile
    offset: int
    nbytes: int

    def is_contiguous(self) -> bool:
        """Return True, as `Tensor.is_contiguous`."""
        return True


class DiskPages:
    """Pages of a number of layers in a file, each layer's one behind the other; those of the first may be in memory.

    Indexed by layer and page, as a tensor `[layers, pages, numbers]`, but gives ranges of the file, for a link to copy.
    """

    def __init__(
        self, file: ScratchFile, size: tuple[int, int, int], dtype: torch.dtype, memory: Tensor | None = None
    ) -> None:
        """`size` is that of all pages; `memory` `[first layers, pages, numbers]` has those that are not in the file."""
        self.file, self.shape, self.dtype, self.memory = file, size, dtype, memory
        self.memory_layers = 0 if memory is None else len(memory)
        self.page_bytes = size[2] * dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, at: tuple[int | slice, int | slice]) -> FileRange | Tensor | list[FileRange | Tensor]:
        """Return a layer's page, a layer's run of pages as one range, or a page in several layers as a list.

        Of a layer in memory, they are tensors.
        """
        layer, page = at
        if isinstance(layer, slice):
            return [self[each, page] for each in range(len(self))[layer]]
        if layer < self.memory_layers:
            return self.memory[layer, page]
        first, end, _ = page.indices(self.shape[1]) if isinstance(page, slice) else (page, page + 1, 1)
        return FileRange(self.file, self._offset(layer, first), (end - first) * self.page_bytes)

    def part(self, layer: int, page: int, start: int, size: int) -> FileRange | Tensor:
        """Return `size` bytes of a page, from its byte `start` on."""
        if self.memory is not None and layer < self.memory_layers:
            return self.memory[layer, page].view(torch.uint8)[start : start + size]
        return FileRange(self.file, self._offset(layer, page) + start, size)

    def _offset(self, layer: int, page: int) -> int:
        return ((layer - self.memory_layers) * self.shape[1] + page) * self.page_bytes

    def new_memory(self, layers: int) -> Tensor:
        """Return uninitialised memory for a page of so many layers, `[layers, numbers]`."""
        return host_memory((layers, self.shape[2]), self.dtype)

    def read_grains(
        self, link: Link, layout: PageLayout, layer: Tensor, page: Tensor, head: Tensor, grain: Tensor
    ) -> Tensor:
        """Return grains of pages `[n, count, ...]` in memory, as `PageFormat.read_grains` takes them.

        All indices are `[n, count]`. Raises TransferFailed.
        """
        grains = layout.grains(torch.empty((1, 1), dtype=self.dtype).expand(1, self.shape[2]))  # for its shape
        heads, each, *numbers = grains.shape[1:]
        picked = torch.empty((layer.numel(), *numbers), dtype=self.dtype)
        within, keys = (head * each + grain).flatten(), (layer * self.shape[1] + page).flatten()
        is_near = layer.flatten() < self.memory_layers
        if self.memory is not None:
            near = layout.grains(self.memory).flatten(0, 3)
            picked[is_near] = near[keys[is_near] * heads * each + within[is_near]]
        groups = [(*divmod(key, self.shape[1]), at) for key, at in _by_page(keys) if not is_near[at[0]]]
        few = self.page_bytes // SMALL_READ_BYTES
        size = picked[:1].nbytes
        small: list[Any] = [
            (picked[i], self.part(of, number, int(within[i]) * size, size))
            for of, number, at in groups
            if len(at) < few
            for i in at.tolist()
        ]
        if small:
            link.wait(link.copy(small))
        whole = [group for group in groups if len(group[2]) >= few]
        memory = self.new_memory(min(len(whole), max(_BATCH_BYTES // self.page_bytes, 1)))
        for start in range(0, len(whole), max(len(memory), 1)):  # some at once
            some = list(zip(memory, whole[start : start + len(memory)], strict=False))
            pairs: list[Any] = [(row, self[of, number]) for row, (of, number, _) in some]
            link.wait(link.copy(pairs))
            for row, (_, _, at) in some:
                picked[at] = row.view(heads * each, *numbers)[within[at]]
        return picked.unflatten(0, layer.shape)


def _by_page(keys: Tensor) -> list[tuple[int, Tensor]]:
    """Return each page's key with the indices of its grains, in the order of the file."""
    order = torch.argsort(keys, stable=True)
    found, counts = torch.unique_consecutive(keys[order], return_counts=True)
    return list(zip(found.tolist(), order.split(counts.tolist()), strict=True))
