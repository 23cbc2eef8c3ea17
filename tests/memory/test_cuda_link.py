"""The order of a CUDA link's copies, on a fake driver that records which stream waits for what. Needs no GPU."""

from contextlib import nullcontext

import pytest
import torch

from offload.memory import cuda_link as cuda
from offload.memory.prefetch import PrefetchItem, PrefetchRing

GPU = torch.device("cuda", 0)


class FakeEvent:
    def __init__(self, enable_timing=False):
        self.over = False
        self.made.append(self)

    def record(self, stream):
        stream.log.append(("record", self))

    def query(self):
        return self.over

    def synchronize(self):
        self.over = True

    def elapsed_time(self, other):
        return 2.0


class FakeStream:
    def __init__(self, device):
        self.log = []
        self.made.append(self)

    def wait_event(self, event):
        self.log.append(("wait", event))

    def waited(self):
        return [event for what, event in self.log if what == "wait"]


@pytest.fixture
def fake_link(monkeypatch):
    """Make a link whose device memory is the second half of a tensor, and whose streams record their calls."""
    memory = torch.zeros(200)
    border = memory[100:].data_ptr()
    FakeEvent.made, FakeStream.made = [], []
    monkeypatch.setattr(cuda, "_on_host", lambda x: x.data_ptr() < border)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    for name, fake in {"Event": FakeEvent, "Stream": FakeStream, "stream": nullcontext}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    link = cuda.CudaLink(GPU)
    link.to_device, link.to_host = FakeStream.made
    link.host, link.device, link.compute = memory[:100], memory[100:], FakeStream(None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: link.compute)
    return link


def test_a_finished_copy_is_counted_and_no_longer_waited_for(fake_link):
    link, host, device = fake_link, fake_link.host, fake_link.device
    out = link.copy([(host[:10], device[:10])], mark := link.mark())
    assert link.to_host.waited() == [mark]
    assert link.seconds(out) is None and link.statistics.bytes == 0
    link.finish(out)
    assert (link.statistics.bytes, link.statistics.busy_s) == (40, 0.002)
    link.copy([(device[:10], host[:10])])
    assert link.to_device.waited() == []
    link.wait(out)
    assert link.compute.waited() == [out.over]


def test_a_ring_knows_the_seconds_of_items_that_finish_after_they_are_taken(fake_link):
    link, host = fake_link, fake_link.host
    ring = PrefetchRing(link, link.device.split(50))
    items = [PrefetchItem(i, host[:50]) for i in range(3)]
    ring.expect(items)
    ring.release(ring.take(items[0]))
    assert ring.seconds is None
    for event in FakeEvent.made:
        event.over = True
    ring.take(items[1])
    assert ring.seconds == 0.002
