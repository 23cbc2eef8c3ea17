"""The contract of `Link` (offload/memory/link.py), for the simulated link and a GPU's."""

import threading
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch

from offload.memory import link as links
from offload.memory.cuda_link import CudaLink
from offload.memory.disk_link import StagedLink
from offload.memory.host_memory import allocator
from offload.memory.link import SimulatedLink, TransferFailed
from tests.support.offloading import CPU, LateLink, random_delays

NUMBERS = 2**16
GPU = torch.device("cuda", 0)
ON_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


class Ends:
    """A link with memory at both of its ends."""

    def __init__(self, link, device):
        self.link, self.device, self._allocate = link, device, allocator(device)

    def on_host(self, value):
        return self._allocate((NUMBERS,), torch.float32).fill_(value)

    def on_device(self, value):
        return torch.full((NUMBERS,), float(value), device=self.device)

    def holds(self, memory, value):
        return bool((memory == value).all())


@pytest.fixture(
    params=[
        "simulated",
        "late now and then",
        "beside a disk",
        pytest.param("cuda", marks=ON_GPU),
        pytest.param("cuda beside a disk", marks=ON_GPU),
    ]
)
def ends(request):
    if request.param == "beside a disk":
        return Ends(StagedLink(SimulatedLink(bandwidth=1e9), CPU, allocator(CPU)), CPU)
    if request.param == "cuda beside a disk":
        return Ends(StagedLink(CudaLink(GPU), GPU, allocator(GPU)), GPU)
    if request.param == "cuda":
        return Ends(CudaLink(GPU), GPU)
    late = random_delays(0, longest=0.01) if request.param == "late now and then" else None
    return Ends(LateLink(before=late), CPU)


def test_copies_keep_their_order(ends):
    target = ends.on_device(0)
    tickets = [ends.link.copy([(target, ends.on_host(value))]) for value in range(20)]
    ends.link.wait(tickets[-1])
    assert ends.holds(target, 19)


def test_a_copy_to_the_host_arrives_before_it_is_copied_back(ends):
    first, host, last = ends.on_device(7), ends.on_host(0), ends.on_device(0)
    ends.link.copy([(host, first)], ends.link.mark())
    ends.link.wait(ends.link.copy([(last, host)]))
    assert ends.holds(last, 7)


def test_host_memory_is_not_overwritten_before_it_is_copied(ends):
    target, host, other = ends.on_device(0), ends.on_host(7), ends.on_device(9)
    there = ends.link.copy([(target, host)])
    back = ends.link.copy([(host, other)], ends.link.mark())
    ends.link.finish(back)
    ends.link.wait(there)
    assert ends.holds(target, 7)


def test_a_copy_begins_after_what_had_been_computed_at_its_mark(ends):
    source, target = ends.on_device(0), ends.on_host(0)
    for _ in range(50):
        source += 1
    ticket = ends.link.copy([(target, source)], ends.link.mark())
    ends.link.finish(ticket)
    assert ends.holds(target, 50)


def test_an_empty_copy_ends_after_all_earlier_copies(ends):
    host, device = ends.on_host(0), ends.on_device(5)
    ticket = ends.link.copy([(host, device)], ends.link.mark())
    ends.link.finish(ends.link.copy(()))
    assert ends.holds(host, 5)
    assert ends.link.seconds(ticket) is not None


@pytest.mark.parametrize("beside_a_disk", [False, True])
def test_the_seconds_of_a_copy_are_those_on_the_slow_link(beside_a_disk):
    """Not of handing it over: they say how fast the link is."""
    slow = SimulatedLink(bandwidth=1e8)
    link = StagedLink(slow, CPU, allocator(CPU)) if beside_a_disk else slow
    ticket = link.copy([(torch.empty(NUMBERS), torch.ones(NUMBERS))])
    link.finish(ticket)
    assert link.seconds(ticket) >= 0.99 * 4 * NUMBERS / slow.bandwidth


def test_statistics_count_bytes_both_ways_and_the_seconds_they_took(ends):
    link, host, device = ends.link, ends.on_host(1), ends.on_device(2)
    assert (link.statistics.bytes, link.statistics.busy_s) == (0, 0)
    tickets = [link.copy([(ends.on_device(0), host)]), link.copy([(ends.on_host(0), device)], link.mark())]
    for ticket in tickets:
        link.finish(ticket)
    link.finish(link.copy(()))
    assert link.statistics.bytes == 2 * 4 * NUMBERS
    assert link.statistics.busy_s >= 0.99 * sum(map(link.seconds, tickets)) > 0


def test_memory_of_different_sizes_or_that_is_not_contiguous_asserts(ends):
    target, source = ends.on_device(0), ends.on_host(1)
    for pair in ((target, source[:-1]), (target[::2], source[::2])):
        with pytest.raises(AssertionError):
            ends.link.copy([pair])


# Failures, which a GPU's driver does not produce on demand


class Cable:
    """A callback that raises for the next `loose` copies."""

    loose = 0

    def __call__(self, pairs):
        if self.loose:
            self.loose -= 1
            raise OSError("the cable is loose")


@pytest.fixture
def cable():
    return Cable()


@pytest.fixture
def unreliable(cable):
    return Ends(LateLink(before=cable), CPU)


def test_waiting_for_a_copy_that_failed_raises_and_finish_does_not(unreliable, cable):
    cable.loose = 1
    ticket = unreliable.link.copy([(unreliable.on_device(0), unreliable.on_host(1))])
    unreliable.link.finish(ticket)
    for _ in range(2):
        with pytest.raises(TransferFailed, match=r"262,144 bytes .* the cable is loose") as caught:
            unreliable.link.wait(ticket)
    assert caught.value.hint
    assert unreliable.link.seconds(ticket) is None


def test_copies_after_one_that_failed_arrive(unreliable, cable):
    cable.loose = 1
    link, target, source = unreliable.link, unreliable.on_device(0), unreliable.on_host(4)
    failed, arrived = link.copy([(target, source)]), link.copy([(target, source)])
    link.wait(arrived)
    assert unreliable.holds(target, 4)
    with pytest.raises(TransferFailed):
        link.wait(failed)
    assert link.statistics.bytes == 4 * NUMBERS  # only copies that succeeded


def test_no_thread_outlives_the_interpreter(monkeypatch):
    """What is under way ends, and what waits behind it is dropped: a thread that ran on would abort the process."""
    monkeypatch.setattr(links, "_threads", WeakKeyDictionary())
    begun, may_end, source = threading.Event(), threading.Event(), torch.ones(4)
    link = LateLink(before=lambda pairs: (begun.set(), may_end.wait(60)))
    targets = torch.zeros(3, 4).unbind()
    for target in targets:
        link.copy([(target, source)])
    begun.wait(60)
    ((thread, queue),) = links._threads.items()
    ended = SimpleNamespace(get_nowait=queue.get_nowait, put=lambda end: (queue.put(end), may_end.set()))
    links._threads[thread] = ended
    links._end_threads()
    assert not thread.is_alive()
    assert [target[0].item() for target in targets] == [1, 0, 0]
