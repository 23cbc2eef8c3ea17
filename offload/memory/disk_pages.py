"""Pages in a scratch file: where keys and values of some layers lie that have no room in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..system.scratch_file import ScratchFile
from .block_store import host_memory


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

    def part(self, layer: int, page: int, start: int, size: int) -> FileRange:
        """Return `size` bytes of a page in the file, from its byte `start` on."""
        return FileRange(self.file, self._offset(layer, page) + start, size)

    def _offset(self, layer: int, page: int) -> int:
        return ((layer - self.memory_layers) * self.shape[1] + page) * self.page_bytes

    def new_memory(self, layers: int) -> Tensor:
        """Return uninitialised memory for a page of so many layers, `[layers, numbers]`, aligned for the file."""
        return host_memory((layers, self.shape[2]), self.dtype)
