"""The prefetch ring: how much of an order it reads, and what it keeps of a changed one."""

from itertools import count

import torch

from offload.memory.prefetch import PrefetchItem, PrefetchRing
from tests.support.offloading import make_link

PAGES = torch.arange(100.0).unsqueeze(1)


def new_ring(buffers=3):
    return PrefetchRing(make_link(), torch.empty(buffers, 1).unbind())


def test_an_order_is_read_as_buffers_become_free():
    ring, asked = new_ring(), []

    def order():
        for page in count():  # never ends
            asked.append(page)
            yield PrefetchItem(page, PAGES[page])

    ring.expect(order())
    assert asked == [0, 1, 2]
    for page in range(5):
        buffer = ring.take(PrefetchItem(page, PAGES[page]))
        assert buffer.item() == page
        ring.release(buffer)
    assert asked == list(range(8))


def test_copies_in_flight_that_match_a_new_order_are_kept():
    ring = new_ring()
    ring.expect(PrefetchItem(page, PAGES[page]) for page in (1, 2, 3))
    copied = ring._link.statistics
    ring.expect(PrefetchItem(page, PAGES[page]) for page in (1, 2, 7, 8))
    for page in (1, 2, 7, 8, 50, 9):  # the last two are not expected
        buffer = ring.take(PrefetchItem(page, PAGES[page]))
        assert buffer.item() == page
        ring.release(buffer)
    assert copied.bytes == 4 * 7  # 3 was copied in vain


def test_a_dropped_order_is_not_continued():
    ring = new_ring(2)
    ring.expect(PrefetchItem(page, PAGES[page]) for page in range(5))
    ring.drop()
    ring.release(ring.take(PrefetchItem(9, PAGES[9])))
    assert ring._link.statistics.bytes == 4 * 3
