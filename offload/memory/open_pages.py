"""The open pages of tiers: those of the newest tokens, on the device until they are whole."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .host_memory import new_pages
from .link import Link, copy_now
from .page import PageRun
from .pages import Pages


class OpenPages:
    """Slots of every layer for the pages that a pass writes to; a page's slot is its number modulo their number.

    There are two, or as many as the pages of a pass. `memory` `[layers, slots, numbers]` is on the device. While a page
    is in its slot, its copy among the whole `pages` is out of date.
    """

    def __init__(self, memory: Tensor, pages: Pages, link: Link, tokens: int) -> None:
        """`tokens`: of a page."""
        self.memory, self._pages, self._link, self._tokens = memory, pages, link, tokens
        self._layers = range(len(memory))
        self._numbers: list[int | None] = [None] * memory.shape[1]  # of the page in each slot

    @property
    def slots(self) -> int:
        """Return how many pages can be open."""
        return len(self._numbers)

    def reserve(self, slots: int) -> None:
        """Have so many slots, or more. Raises TransferFailed."""
        if slots > self.slots:
            self.flush()
            layers, _, numbers = self.memory.shape
            self.memory = new_pages((layers, slots, numbers), self.memory.dtype, self.memory.device)
            self._numbers = [None] * slots

    def slot(self, page: int) -> int:
        """Return the number of a page's slot."""
        return page % self.slots

    def __contains__(self, page: int) -> bool:
        return self._numbers[self.slot(page)] == page

    def contains(self, pages: Tensor) -> Tensor:
        """Return which of some page numbers are in their slots, as booleans."""
        numbers = torch.tensor([-1 if page is None else page for page in self._numbers])
        return pages == numbers[pages % len(numbers)]

    def buffer(self, layer: int, page: int) -> Tensor:
        """Return the slot of a page in one layer, `[numbers]` on the device."""
        return self.memory[layer, self.slot(page)]

    def on_device(self, layer: int, page: int) -> Tensor:
        """Return the newest copy of a page in one layer, `[1, numbers]` on the device. Raises TransferFailed."""
        if page in self:
            return self.buffer(layer, page).unsqueeze(0)
        copy = new_pages((1, self.memory.shape[2]), self.memory.dtype, self.memory.device)
        self._pages.read(range(layer, layer + 1), page, copy, self._link)
        return copy

    def run(self, layer: int, pages: range) -> PageRun:
        """Return one or two consecutive pages of a layer, which are in their slots."""
        return PageRun(self.memory[layer], tuple(map(self.slot, pages)))

    def newest(self, page: int, layers: range | None = None) -> Tensor:
        """Return the newest copy of a page in some layers, `[layers, numbers]`, to be read: in its slot or on the host.

        Raises TransferFailed.
        """
        layers = layers or self._layers
        if page in self:
            return self.memory[layers.start : layers.stop, self.slot(page)]
        return self._pages.on_host(layers, page, self._link)

    def edited(self, page: int, whole: bool = False) -> Tensor:
        """Return the newest copy of a page in all layers, `[layers, numbers]`, to be written to; all of it if `whole`.

        A page on disk, or packed, is opened, and stays open until its slot is needed: a prompt is restored in parts of
        a page. Raises TransferFailed.
        """
        slot = self.slot(page)
        if page not in self and not self._pages.is_writable:
            self._close(slot)
            if not whole:
                self._pages.read(self._layers, page, self.memory[:, slot], self._link)
            self.open(page)
        return self.newest(page)

    def open(self, page: int) -> None:
        """Assign a page to its slot, which will be written to."""
        self._numbers[self.slot(page)] = page

    def advance(self, start: int, held: int = 0) -> None:
        """Prepare a pass from position `start` on: copy whole pages to the host, and its first page to its slot.

        Pages of the `held` tokens behind `start` stay in their slots. Raises TransferFailed.
        """
        current, last = (position // self._tokens for position in (start, max(start + held - 1, start)))
        for slot, page in self._occupied():
            if page < current:
                self._write(page)
            if not current <= page <= last:
                self._numbers[slot] = None
        if start % self._tokens and current not in self:
            self._pages.read(self._layers, current, self.memory[:, self.slot(current)], self._link)
            self.open(current)  # also during a prefill pass, which writes to buffers of its own

    def flush(self) -> None:
        """Copy all open pages to the host, and empty the slots. Raises TransferFailed."""
        for slot in range(self.slots):
            self._close(slot)

    def clear(self) -> None:
        """Empty the slots: the host has the newest copies."""
        self._numbers = [None] * self.slots

    def _close(self, slot: int) -> None:
        """Copy the page in a slot, if there is one, to the host, and empty the slot."""
        if (page := self._numbers[slot]) is not None:
            self._write(page)
            self._numbers[slot] = None

    def _write(self, page: int) -> None:
        slot = self.slot(page)
        copy_now(self._link, self._pages.writes(self._layers, page, self.memory[:, slot : slot + 1]))

    def _occupied(self) -> Iterator[tuple[int, int]]:
        return ((slot, page) for slot, page in enumerate(tuple(self._numbers)) if page is not None)
