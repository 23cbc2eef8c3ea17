"""Layer-by-layer prefill: device buffers for a pass over more tokens than a page has.

A layer's pages stay on the device while it computes, so no page is read back. They are copied to the host while the
next layer computes in the other set of buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .tiers import Tiers


class PrefillBuffers:
    """Device buffers for the pages from number `first` on, up to position `end`, of two layers at a time.

    If `begun`, the first page has committed tokens. They are copied from the page's open slot, which does not change,
    so an aborted pass leaves all committed tokens intact.
    """

    def __init__(self, tiers: Tiers, first: int, end: int, begun: bool) -> None:
        self._tiers, self._first, self._begun = tiers, first, begun
        count = -(-end // tiers.format.tokens) - first
        size = (2, count, tiers.format.numbers)
        with torch.inference_mode(False):
            self._buffers = torch.empty(size, dtype=tiers.open.dtype, device=tiers.open.device)
        self._layers: list[int | None] = [None, None]  # the layer whose pages are in each set
        self._tickets: list[Any] = [None, None]

    def buffer(self, layer: int, page: int) -> Tensor:
        """Return the buffer of a page of the current layer."""
        side = layer % 2
        if self._layers[side] != layer:
            self._wait(side)
            self._layers[side] = layer
            if self._begun:
                self._buffers[side, 0].copy_(self._tiers.open[layer, self._first % 2])
        return self._buffers[side, page - self._first]

    def store(self, layer: int) -> None:
        """Begin to copy the pages of a finished layer to the host."""
        link, side = self._tiers.link, layer % 2
        targets = self._tiers.pages[layer, self._first :]
        pairs = list(zip(targets, self._buffers[side], strict=False))
        self._tickets[side] = link.copy(pairs, link.mark())

    def finish(self) -> None:
        """Wait until all pages are in host memory."""
        for side in range(2):
            self._wait(side)

    def _wait(self, side: int) -> None:
        link, ticket = self._tiers.link, self._tickets[side]
        if ticket is not None:
            link.wait(ticket)
            link.finish(ticket)
            self._tickets[side] = None
