"""Prefetch: a ring of buffers on the device that is filled in a known order, one buffer while another is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .link import Link, Pair, TransferFailed


class PrefetchItem(NamedTuple):
    """Something to copy to the device. Items with the same `key` have the same content."""

    key: Hashable
    copies: Callable[[Tensor], Sequence[Pair]]  # into a buffer


class _Slot(NamedTuple):
    buffer: Tensor
    ticket: Any
    key: Hashable


class PrefetchRing:
    """Buffers that are filled in the order of `expect` and given out in the same order by `take`.

    As many items as there are free buffers are under way at any time. What is taken in another order than expected is
    brought at once, without overlap. `overlap` False brings everything only when it is taken: to be compared with.
    """

    def __init__(self, link: Link, buffers: Sequence[Tensor], overlap: bool = True) -> None:
        assert len(buffers) >= 2, "one buffer cannot be filled while it is used"
        self._link = link
        self._overlap = overlap
        self._buffers = tuple(buffers)
        mark = link.mark()  # until now the buffers' memory may be in use by what it was before
        self._free: deque[tuple[Tensor, Any]] = deque((buffer, mark) for buffer in buffers)  # and when it is free
        self._expected: deque[PrefetchItem] = deque()
        self._coming: deque[_Slot] = deque()
        self._untimed: deque[Any] = deque()  # tickets of items that have been taken, perhaps before they came
        self.seconds: float | None = None  # that a item took on the link, if that has become known with the last one

    def expect(self, items: Iterable[PrefetchItem]) -> None:
        """Set what will be taken, in this order. Copies under way that are wanted in that order are kept."""
        items = deque(items)
        kept: deque[_Slot] = deque()
        while self._coming and items and self._coming[0].key == items[0].key:
            kept.append(self._coming.popleft())
            items.popleft()
        self.drop()
        self._coming, self._expected = kept, items
        self._fill()

    def take(self, item: PrefetchItem) -> Tensor:
        """Return the buffer once the copy is there, to be released later. Raises TransferFailed after two tries."""
        if self._coming and self._coming[0].key == item.key:
            slot = self._coming.popleft()
        else:
            self.drop()
            slot = self._start(item)
        try:
            slot = self._waited(slot, item)
        except BaseException:
            self._link.finish(slot.ticket)
            self._free.append((slot.buffer, None))
            self.drop()
            raise
        self._untimed.append(slot.ticket)
        self._look()
        return slot.buffer

    def _waited(self, slot: _Slot, item: PrefetchItem) -> _Slot:
        """Once it has come; a copy that has failed is tried once more."""
        try:
            self._link.wait(slot.ticket)
        except TransferFailed:
            slot = slot._replace(ticket=self._link.copy(item.copies(slot.buffer), None))
            self._link.wait(slot.ticket)
        return slot

    def _look(self) -> None:
        """How long items took: where the device computes by itself, that is known long after they were taken."""
        self.seconds = None
        while self._untimed and (seconds := self._link.seconds(self._untimed[0])) is not None:
            self._untimed.popleft()
            self.seconds = seconds

    def release(self, buffer: Tensor) -> None:
        """Let the buffer be filled again once everything submitted up to now is computed."""
        self._free.append((buffer, self._link.mark()))
        self._fill()

    def drop(self) -> None:
        """Cancel what is expected and what is on its way."""
        self._expected.clear()
        while self._coming:
            slot = self._coming.popleft()
            self._link.finish(slot.ticket)
            self._free.append((slot.buffer, None))

    def reset(self) -> None:
        """Start over after a pass that was broken off anywhere: every buffer is free again."""
        self._link.finish(self._link.copy(()))  # whatever had been asked for is over
        mark = self._link.mark()
        self._expected.clear()
        self._coming.clear()
        self._untimed.clear()
        self._free = deque((buffer, mark) for buffer in self._buffers)

    def _fill(self) -> None:
        if self._overlap:
            while self._expected and self._free:
                self._coming.append(self._start(self._expected.popleft()))

    def _start(self, item: PrefetchItem) -> _Slot:
        buffer, used = self._free.popleft()
        return _Slot(buffer, self._link.copy(item.copies(buffer), used), item.key)
