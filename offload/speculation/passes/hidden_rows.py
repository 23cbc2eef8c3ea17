"""Keeps the hidden rows of a sequence's latest tokens for drafters that read them, in constant memory."""

import torch
from torch import Tensor

from ...settings.method_sizes import SPARE_ROWS


class HiddenRows:
    """A ring of the rows that a runner's passes returned, by position; only the runner writes to it.

    Nothing is read back from the device. Rows of rejected tokens are dropped with the tokens.
    """

    def __init__(self, window: int) -> None:
        """Keep the rows of the latest `window` tokens at least."""
        self.window = window
        self.first = self.length = 0  # positions of the rows that are there
        self._nodes: list[Tensor] = []  # the rows of a tree in flight
        self._ring: Tensor | None = None  # [capacity, width]; row p is that of position p modulo the capacity

    @torch.inference_mode()
    def put(self, start: int, rows: Tensor) -> None:
        """Store rows `[tokens, width]` of the tokens from position `start` on; later ones are dropped."""
        if self._ring is None or self._ring.shape[1] != rows.shape[1]:
            self._ring = rows.new_empty((self.window + SPARE_ROWS, rows.shape[1]))
            self.first = self.length = start
        if not self.first <= start <= self.length:  # there is a gap
            self.first = start
        capacity, end = len(self._ring), start + len(rows)
        rows = rows[-capacity:]
        self.first, self.length = max(self.first, end - capacity), end
        at = (end - len(rows)) % capacity
        before = min(capacity - at, len(rows))
        self._ring[at : at + before] = rows[:before]
        self._ring[: len(rows) - before] = rows[before:]

    @torch.inference_mode()
    def get(self, start: int, end: int) -> Tensor:
        """Return the rows `[end - start, width]` of the tokens at positions `start` to `end` - 1, which are there."""
        assert self._ring is not None and self.first <= start < end <= self.length, "rows that are not there"
        at, capacity = start % len(self._ring), len(self._ring)
        before = min(capacity - at, end - start)
        return torch.cat((self._ring[at : at + before], self._ring[: end - start - before]))

    def truncate(self, length: int) -> None:
        """Drop the rows of the tokens at position `length` and after."""
        self.length = min(self.length, length)
        self.first = min(self.first, self.length)

    def hold(self, rows: Tensor) -> None:
        """Keep the rows `[tokens, width]` of further nodes of a tree in flight, apart."""
        self._nodes.append(rows)

    def release(self) -> Tensor | None:
        """Return the rows `[nodes, width]` of the tree in flight, which are kept no longer; None if there are none."""
        rows, self._nodes = self._nodes, []
        return torch.cat(rows) if rows else None
