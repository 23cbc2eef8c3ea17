"""What a pass on a GPU launches, copies and waits for, seen on fake tensors of real shapes."""

import pytest
import torch

from offload.kernels import triton
from offload.offloading import factory
from offload.offloading.factory import TieredStoreFactory, TierSettings
from tests.support.fake_cuda import GPU, FakeLink, fake_cuda
from tests.support.fake_models import SHAPES, fake_shape, load_fake

LAYERS, RESIDENT, CONTEXT = 4, 1, 20_000
OUTSIDE = 30  # launches a layer beside attention
ATTENTION = {"attend", "finish", "_scaled_dot_product_flash_attention"}


@pytest.fixture(params=SHAPES)
def shape(request):
    return fake_shape(request.param, LAYERS)


@pytest.fixture(params=[True, False], ids=["triton", "torch"])
def with_triton(request, monkeypatch):
    monkeypatch.setattr(triton, "serves", lambda q: request.param and q.device == GPU and len(q) <= triton.ROWS)
    return request.param


@pytest.fixture
def tiered(monkeypatch):
    """A function that returns a full cache of some tokens, of which all but RESIDENT layers are offloaded."""

    def new(model, tokens=CONTEXT):
        stores = TieredStoreFactory(model.operations, GPU, TierSettings(resident_layers=RESIDENT), FakeLink())
        capacity = tokens + 4096
        cache = model.new_cache(capacity, store=stores.new_store(model.shape, capacity, torch.bfloat16))
        cache._length = tokens
        return cache

    monkeypatch.setattr(factory, "allocator", lambda device: lambda size, dtype: torch.empty(size, dtype=dtype))
    return new


def run(usage, model, cache, tokens):
    """Run a pass; return what it launches."""
    ids = torch.zeros(tokens, dtype=torch.long, device=GPU)
    with usage.of() as launches:
        model.logits(model.forward(ids, cache))
    return launches


@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_a_step_over_a_resident_cache_launches_little_and_waits_for_nothing(shape, with_triton, tokens):
    with fake_cuda() as usage:
        model = load_fake(shape)
        cache = model.new_cache(4096)
        cache._length = 3000
        launches = run(usage, model, cache, tokens)
    attention = sum(count for name, count in launches.items() if name in ATTENTION)
    assert usage.to_host == 0
    assert sum(launches.values()) - attention <= (OUTSIDE if with_triton else 2 * OUTSIDE) * LAYERS
    if with_triton:
        assert attention == 2 * LAYERS


@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_a_streamed_page_is_one_launch(shape, tiered, monkeypatch, tokens):
    monkeypatch.setattr(triton, "serves", lambda q: q.device == GPU and len(q) <= triton.ROWS)
    with fake_cuda() as usage:
        model = load_fake(shape)
        cache = tiered(model)
        launches = run(usage, model, cache, tokens)
        tiers = cache.store.tiers
    pages = CONTEXT // tiers.format.tokens
    away = LAYERS - RESIDENT
    assert usage.to_host == 0
    assert launches["attend"] <= away * (pages + 2) + RESIDENT
    assert launches["finish"] == LAYERS
    others = sum(count for name, count in launches.items() if name not in ATTENTION)
    assert others <= OUTSIDE * LAYERS
    assert tiers.link.statistics.bytes >= away * pages * tiers.format.numbers * 2


def test_without_triton_the_same_pass_runs_on_torchs_kernels(shape, tiered, monkeypatch):
    monkeypatch.setattr(triton, "serves", lambda q: False)
    with fake_cuda() as usage:
        model = load_fake(shape)
        launches = run(usage, model, tiered(model), 5)
    assert launches["attend"] == 0
    assert launches["_scaled_dot_product_flash_attention"] >= LAYERS
    assert usage.to_host == 0


def test_the_memory_of_a_prefill_chunk_does_not_grow_with_the_pages_before_it(shape, tiered):
    peaks = []
    for context in (CONTEXT // 4, CONTEXT // 2):
        with fake_cuda() as usage:
            model = load_fake(shape)
            cache = tiered(model, context)
            before, usage.peak = usage.now, usage.now
            run(usage, model, cache, 2048)
            peaks.append(usage.peak - before)
    assert peaks[0] == peaks[1]
