"""The order in which a recording uses CUDA, and what a failed one leaves behind, without a GPU."""

import gc
from contextlib import contextmanager

import pytest
import torch

from offload.speculation.passes import cuda_graphs
from offload.speculation.passes.cuda_graphs import CudaRecorder

DEVICE = torch.device("cuda", 0)


class FakeStream:
    device_index = 0

    def __init__(self, cuda, name):
        self._cuda, self._name = cuda, name

    def wait_stream(self, other):
        self._cuda.log.append(f"{self._name} waits for {other._name}")


class FakeCuda:
    """What a recorder uses of torch.cuda. Its graphs fail to end a capture in which something has raised."""

    def __init__(self):
        self.log = []
        self.main = self.current = FakeStream(self, "main")
        self.is_capturing = self.is_invalid = False
        self.left = []  # pools whose capture the allocator was told to leave

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph(self):
        return FakeGraph(self)


class FakeGraph:
    def __init__(self, cuda):
        self._cuda = cuda

    def capture_begin(self, pool, capture_error_mode):
        assert not self._cuda.is_capturing
        self._cuda.is_capturing = True
        self._cuda.log.append(f"capture {capture_error_mode}, pool {pool}")

    def capture_end(self):
        assert self._cuda.is_capturing
        self._cuda.is_capturing = False
        self._cuda.log.append("end")
        if self._cuda.is_invalid:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self):
        self._cuda.log.append("replay")


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(CudaRecorder, "_error", None)
    monkeypatch.setattr(cuda_graphs, "_side_stream", lambda device: FakeStream(fake, "side"))
    for name, value in {
        "current_stream": lambda device: fake.current,
        "stream": fake.stream,
        "CUDAGraph": fake.graph,
        "graph_pool_handle": lambda: 7,
        "synchronize": lambda device: fake.log.append("synchronize"),
        "empty_cache": lambda: fake.log.append("empty cache"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *args: fake.left.append(args), raising=False)
    return fake


def test_a_recording_warms_up_on_the_stream_that_it_is_captured_on(cuda):
    def run():
        cuda.log.append(f"run on {cuda.current._name}, {'no ' * (not gc.isenabled())}collection")
        return torch.zeros(1)

    replay = CudaRecorder(DEVICE)(run)
    assert cuda.log == [
        "side waits for main",
        "run on side, collection",
        "run on side, collection",
        "synchronize",
        "empty cache",
        "capture thread_local, pool 7",
        "run on side, no collection",
        "end",
        "main waits for side",
    ]
    replay()
    assert cuda.log[-1] == "replay"
    assert gc.isenabled()


@pytest.mark.parametrize("failing", [1, 2, 3, "end"], ids=["first run", "second run", "captured run", "end of capture"])
def test_after_a_failure_all_is_as_before_and_nothing_is_recorded_again(cuda, failing):
    runs = []

    def run():
        runs.append(1)
        if len(runs) == failing:
            cuda.is_invalid = cuda.is_capturing
            raise ValueError("a compiler's error")
        return torch.zeros(1)

    cuda.is_invalid = failing == "end"
    with pytest.raises(RuntimeError if failing == "end" else ValueError):
        CudaRecorder(DEVICE)(run)
    assert not cuda.is_capturing
    assert cuda.current is cuda.main
    assert cuda.log[-1] == "main waits for side"
    assert gc.isenabled()
    assert cuda.left == ([(0, 7)] if failing in (3, "end") else [])
    count = len(runs)
    with pytest.raises(RuntimeError, match="compiler" if failing != "end" else "previous error"):
        CudaRecorder(DEVICE)(run)
    assert len(runs) == count


def test_an_interrupt_during_a_capture_ends_it_and_is_raised(cuda):
    def run():
        if cuda.is_capturing:
            cuda.is_invalid = True
            raise KeyboardInterrupt
        return torch.zeros(1)

    with pytest.raises(KeyboardInterrupt):
        CudaRecorder(DEVICE)(run)
    assert not cuda.is_capturing
    cuda.is_invalid = False
    CudaRecorder(DEVICE)(lambda: torch.zeros(1))
