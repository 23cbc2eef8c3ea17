"""Prefetch: a ring of device buffers, filled in a known order while others are in use."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from .link import Link, Pair, TransferFailed


class PrefetchItem(NamedTuple):
    """A copy of `source` to a buffer. Items with the same `key` have the same content; `pages` is for the time of one.

    A subclass may divide the copy.
    """

    key: Any
    source: Any
    pages: int = 1

    def copies(self, buffer: Tensor) -> list[Pair]:
        return [(buffer, self.source)]


class _Slot(NamedTuple):
    buffer: Tensor
    ticket: Any
    key: Any


class PrefetchRing:
    """Device buffers that are filled in the order of `expect` and returned in the same order by `take`.

    As many items are in flight as there are free buffers. An item that is taken out of order is copied at once, without
    overlap.
    """

    def __init__(self, link: Link, buffers: Sequence[Tensor]) -> None:
        assert len(buffers) >= 2, "one buffer cannot be filled while it is used"
        self._link = link
        self.buffers = tuple(buffers)
        mark = link.mark()  # earlier work may still use the buffers' memory
        self._free = deque((buffer, mark) for buffer in buffers)  # with the mark that frees it
        self._expected: Iterator[PrefetchItem] = iter(())
        self._in_flight: deque[_Slot] = deque()
        # The tickets and pages of taken items whose time on the link is not known yet.
        self._untimed: deque[tuple[Any, int]] = deque()
        self.seconds: float | None = None  # the newest known time of a page on the link; None if unknown since the last

    def expect(self, items: Iterable[PrefetchItem]) -> None:
        """Set the items that will be taken, in order. Copies in flight that match the new order are kept.

        Items are read one by one, as buffers become free.
        """
        expected = iter(items)
        kept: deque[_Slot] = deque()
        while self._in_flight and (item := next(expected, None)) is not None:
            if self._in_flight[0].key != item.key:
                expected = chain((item,), expected)
                break
            kept.append(self._in_flight.popleft())
        self.drop()
        self._in_flight, self._expected = kept, expected
        self._fill()

    def take(self, item: PrefetchItem) -> Tensor:
        """Return the item's buffer once it is filled; release it after use. Raises TransferFailed after two tries."""
        if self._in_flight and self._in_flight[0].key == item.key:
            slot = self._in_flight.popleft()
        else:
            self.drop()
            slot = self._start(item)
        try:
            slot = self._wait(slot, item)
        except BaseException:
            self._link.finish(slot.ticket)
            self._free.append((slot.buffer, None))
            self.drop()
            raise
        self._untimed.append((slot.ticket, item.pages))
        self._update_seconds()
        return slot.buffer

    def _wait(self, slot: _Slot, item: PrefetchItem) -> _Slot:
        """Wait for the slot's copy, and retry it once if it failed."""
        try:
            self._link.wait(slot.ticket)
        except TransferFailed:
            slot = slot._replace(ticket=self._link.copy(item.copies(slot.buffer), None))
            self._link.wait(slot.ticket)
        return slot

    def _update_seconds(self) -> None:
        """Read the times of finished items, which an asynchronous device knows long after they were taken."""
        self.seconds = None
        while self._untimed and (seconds := self._link.seconds(self._untimed[0][0])) is not None:
            self.seconds = seconds / self._untimed.popleft()[1]

    def release(self, buffer: Tensor) -> None:
        """Let the buffer be filled again once everything submitted up to now is computed."""
        self._free.append((buffer, self._link.mark()))
        self._fill()

    def drop(self) -> None:
        """Cancel expected items and copies in flight."""
        self._expected = iter(())
        while self._in_flight:
            slot = self._in_flight.popleft()
            self._link.finish(slot.ticket)
            self._free.append((slot.buffer, None))

    def reset(self) -> None:
        """Start over after an aborted pass: every buffer is free again."""
        self._link.finish(self._link.copy(()))  # everything submitted before has ended
        mark = self._link.mark()
        self._expected = iter(())
        self._in_flight.clear()
        self._untimed.clear()
        self._free = deque((buffer, mark) for buffer in self.buffers)

    def _fill(self) -> None:
        while self._free and (item := next(self._expected, None)) is not None:
            self._in_flight.append(self._start(item))

    def _start(self, item: PrefetchItem) -> _Slot:
        buffer, used = self._free.popleft()
        return _Slot(buffer, self._link.copy(item.copies(buffer), used), item.key)
