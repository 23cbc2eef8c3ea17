"""The open pages of a tiered store: the newest tokens, on the device until their page is whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .disk_pages import FileRange
from .page import PageRun
from .tiers import QuantizedTiers, Tiers


class OpenPages:
    """Slots of every layer for the pages that a pass writes to; a page's slot is its number modulo their number.

    There are two, or as many as the pages of a pass.

    While a page is in its slot, its host copy is out of date.
    """

    def __init__(self, tiers: Tiers | QuantizedTiers) -> None:
        self._tiers = tiers
        self._pages: list[int | None] = [None] * tiers.open.shape[1]  # the page in each slot

    @property
    def slots(self) -> int:
        """Return how many pages can be open."""
        return len(self._pages)

    def slot(self, page: int) -> int:
        """Return the number of a page's slot."""
        return page % len(self._pages)

    def __contains__(self, page: int) -> bool:
        return self._pages[self.slot(page)] == page

    def buffer(self, layer: int, page: int) -> Tensor:
        """Return the slot of a page in one layer, `[numbers]` on the device."""
        return self._tiers.open[layer, self.slot(page)]

    def run(self, layer: int, pages: range) -> PageRun:
        """Return one or two consecutive pages of a layer, which are in their slots."""
        return PageRun(self._tiers.open[layer], tuple(map(self.slot, pages)))

    def newest(self, page: int, layers: slice = slice(None)) -> Tensor:
        """Return the newest copy of a page in some layers, `[layers, numbers]`, to be read.

        It is in its slot on the device, or else in host memory, to which a page on disk is read. Raises TransferFailed.
        """
        if page in self:
            return self._tiers.open[layers, self.slot(page)]
        pages = self._tiers.pages
        if isinstance(pages, Tensor):
            return pages[layers, page]
        sources = pages[layers, page]
        memory = pages.new_memory(len(sources))
        self._copy(memory, sources)
        return memory

    def edited(self, page: int, whole: bool = False) -> Tensor:
        """Return the newest copy of a page in all layers, `[layers, numbers]`, to be written to; all of it if `whole`.

        A page on disk is opened, and stays open until its slot is needed: a prompt is restored in parts of a page.
        Raises TransferFailed.
        """
        pages, slot = self._tiers.pages, self.slot(page)
        if page not in self and not isinstance(pages, Tensor):
            self._close(slot)
            if not whole:
                self._copy(self._tiers.open[:, slot], pages[:, page])
            self.open(page)
        return self.newest(page)

    def _close(self, slot: int) -> None:
        """Copy the page in a slot, if there is one, to where its host copy is, and empty the slot."""
        if self._pages[slot] is not None:
            self._copy(self._tiers.pages[:, self._pages[slot]], self._tiers.open[:, slot])
            self._pages[slot] = None

    def contains(self, pages: Tensor) -> Tensor:
        """Return which of some page numbers are in their slots, as booleans."""
        numbers = torch.tensor([-1 if page is None else page for page in self._pages])
        return pages == numbers[pages % len(numbers)]

    def open(self, page: int) -> None:
        """Assign a page to its slot, which will be written to."""
        self._pages[self.slot(page)] = page

    def advance(self, start: int, held: int = 0) -> None:
        """Prepare a pass from position `start` on: copy whole pages to the host, and its first page to its slot.

        Pages of the `held` tokens behind `start` stay in their slots.
        """
        tiers = self._tiers
        current, last = (position // tiers.format.tokens for position in (start, max(start + held - 1, start)))
        for slot, page in self._occupied():
            if page < current:
                self._copy(tiers.pages[:, page], tiers.open[:, slot])
            if not current <= page <= last:
                self._pages[slot] = None
        if start % tiers.format.tokens and current not in self:
            self._copy(tiers.open[:, self.slot(current)], tiers.pages[:, current])
            self.open(current)  # also during a prefill pass, which writes to buffers of its own

    def flush(self) -> None:
        """Copy all open pages to the host, and empty the slots."""
        for slot in range(len(self._pages)):
            self._close(slot)

    def clear(self) -> None:
        """Empty the slots: host memory has the newest copies."""
        self._pages = [None] * len(self._pages)

    def _occupied(self) -> Iterator[tuple[int, int]]:
        return ((slot, page) for slot, page in enumerate(tuple(self._pages)) if page is not None)

    def _copy(self, targets: Tensor | list[FileRange], sources: Tensor | list[FileRange]) -> None:
        link = self._tiers.link
        link.wait(ticket := link.copy(list(zip(targets, sources, strict=True)), link.mark()))
        link.finish(ticket)
