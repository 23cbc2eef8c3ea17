"""Pinning of host memory, on a fake CUDA runtime. Needs no GPU."""

import gc
import mmap
import threading

import pytest
import torch

from offload import GenerationConfig, Sampling, Speculation
from offload.errors import Degraded
from offload.events import Pinned, Prefilled
from offload.kernels.ops import TorchOperations
from offload.loading.formats.safetensors import FolderCheckpoint
from offload.memory import factory
from offload.memory import host_memory as host
from offload.memory.factory import TieredStoreFactory
from offload.memory.host_memory import Pinning, host_memory
from offload.session.session import Session
from offload.speculation.sampling.warp import Sampler
from tests.support.models import id_tensor, make_hf_model
from tests.support.offloading import CPU, SHAPE, make_link, make_model, settings

ROW = 3 * mmap.PAGESIZE


class FakeCudart:
    """Registers no page twice, and refuses from piece number `refused` on."""

    def __init__(self):
        self.registered = {}
        self.calls, self.refused = 0, None
        self.gate = threading.Event()  # registering waits for it
        self.gate.set()

    def cudaHostRegister(self, address, size, flags):
        self.gate.wait(60)
        self.calls += 1
        if self.refused is not None and self.calls > self.refused:
            return 2
        for other, bytes in self.registered.items():
            assert address + size <= other or other + bytes <= address
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]


@pytest.fixture
def cudart(monkeypatch):
    fake = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host, "_clear_error", lambda: None)
    monkeypatch.setattr(host, "PIECE", 2 * ROW)
    yield fake
    gc.collect()  # what is still pinned is unpinned by the fake
    assert fake.registered == {}


def memory_of(rows):
    return host_memory((rows, ROW // 4), torch.float32)


def test_memory_is_pinned_in_whole_rows_until_it_is_freed(cudart, recwarn):
    memory = memory_of(5)
    Pinning(memory).wait()
    assert cudart.registered == {memory.data_ptr() + 2 * ROW * i: min(2, 5 - 2 * i) * ROW for i in range(3)}
    assert not [each for each in recwarn if each.category is Degraded]
    del memory
    gc.collect()
    assert cudart.registered == {}


@pytest.mark.parametrize(("refused", "rest"), [(0, 5), (1, 3), (2, 1)])
def test_refused_memory_stays_pageable_with_a_warning(cudart, refused, rest):
    cudart.refused = refused
    memory = memory_of(5)
    pinned = Pinning(memory)
    with pytest.warns(Degraded, match=f"{rest * ROW:,} of {5 * ROW:,} bytes of host memory could not be pinned"):
        list(pinned.progress())
    assert sum(cudart.registered.values()) == (5 - rest) * ROW
    pinned.wait()  # silent: one warning is enough
    del memory
    gc.collect()
    assert cudart.registered == {}


@pytest.fixture
def stores(cudart, monkeypatch, tmp_path):
    """A factory of stores on the CPU whose pages are pinned as a GPU's are, and their shape."""
    make_hf_model("llama", **SHAPE).save_pretrained(tmp_path)

    def begin(size, dtype, device):
        memory = host_memory(size, dtype)
        return memory, Pinning(memory)

    monkeypatch.setattr(factory, "begin_allocation", begin)
    return TieredStoreFactory(TorchOperations(), CPU, settings(), make_link()), FolderCheckpoint(tmp_path).shape


def generate(session):
    model = session.full.model
    sampler = Sampler(Sampling(temperature=0), 0, model.shape.vocab, model.device)
    settings = GenerationConfig(max_new_tokens=2), Speculation()
    return session.generate(id_tensor(100).tolist(), sampler, *settings, frozenset())


def test_a_session_reports_the_wait_before_the_prefill(stores, cudart, tmp_path):
    cudart.gate.clear()
    session = Session(make_model(tmp_path, native=False), None, 500, 50, stores[0])
    pages = session.full.cache.store.tiers.pages
    interrupted = generate(session)
    assert next(interrupted) == Pinned(0, pages.nbytes)
    interrupted.close()
    events = generate(session)
    assert next(events) == Pinned(0, pages.nbytes)
    cudart.gate.set()
    kinds = [type(event) for event in events]
    assert Prefilled in kinds[kinds.count(Pinned) :]
    assert Pinned not in kinds[kinds.index(Prefilled) :]
    assert sum(cudart.registered.values()) == pages.nbytes
