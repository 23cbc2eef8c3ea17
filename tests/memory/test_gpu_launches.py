"""What a pass on a GPU launches, copies and waits for, seen on fake tensors of real shapes."""

import pytest
import torch

from offload.caches.plane import PlaneCache
from offload.caches.selection import RecencySelector, Refresh
from offload.kernels import triton
from offload.memory import factory, page_prefill
from offload.memory.factory import TieredStoreFactory
from offload.memory.tier_settings import TierSettings
from offload.parallel import ALONE, Alone
from offload.planning import roofline
from offload.planning.activations import activation_bytes
from offload.planning.memory import mean_key_bytes, prefill_bytes
from offload.settings.kv_formats import BF16
from tests.support.fake_cuda import GPU, FakeLink, fake_cuda
from tests.support.fake_models import SHAPES, fake_shape, load_fake

LAYERS, RESIDENT, CONTEXT = 4, 1, 20_000
OUTSIDE, SPLITS = 9, 4  # launches a layer beside attention, and of quantised products whose inputs are divided
BY_TORCH = 30  # with other tiers, or by torch's operations
ATTENTION = {"attend", "finish", "_scaled_dot_product_flash_attention"}


class TwoRanks(Alone):
    """The first of two ranks, whose all-reduce is one launch."""

    size = 2

    def __init__(self, usage):
        self._usage = usage

    def sum(self, x):
        self._usage.launches["all_reduce"] += 1
        return x

    def gather(self, x, widths):
        return x


@pytest.fixture(params=SHAPES)
def shape(request):
    return fake_shape(request.param, LAYERS)


@pytest.fixture(autouse=True)
def rows_by_triton(monkeypatch):
    monkeypatch.setattr(triton, "serves_rows", lambda x: x.device == GPU)


@pytest.fixture(params=[True, False], ids=["triton", "torch"])
def with_triton(request, monkeypatch):
    monkeypatch.setattr(triton, "serves", lambda q: request.param and q.device == GPU and len(q) <= triton.ROWS)
    monkeypatch.setattr(triton, "serves_rows", lambda x: request.param and x.device == GPU)
    return request.param


@pytest.fixture
def tiered(monkeypatch):
    """A function that returns a full cache of some tokens, of which all but RESIDENT layers are offloaded."""

    def new(model, tokens=CONTEXT, room=4096, kv=BF16, resident=RESIDENT, mode="stream"):
        settings = TierSettings(mode, resident_layers=resident)
        stores = TieredStoreFactory(model.operations, GPU, settings, FakeLink(), kv=kv)
        capacity = tokens + room
        cache = model.new_cache(capacity, store=stores.new_store(model.shape, capacity, torch.bfloat16))
        cache.length = tokens
        return cache

    monkeypatch.setattr(page_prefill, "allocator", lambda device: lambda size, dtype: torch.empty(size, dtype=dtype))
    monkeypatch.setattr(factory, "begin_allocation", lambda size, dtype, device: (torch.empty(size, dtype=dtype), None))
    return new


def run(usage, model, cache, tokens):
    """Run a pass; return what it launches."""
    ids = torch.zeros(tokens, dtype=torch.long, device=GPU)
    with usage.of() as launches:
        model.logits(model.forward(ids, cache))
    return launches


@pytest.mark.daily("8B-*-1", "8B-*-33", "7B-triton-8")
@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_a_step_over_a_resident_cache_launches_little_and_waits_for_nothing(shape, with_triton, tokens):
    with fake_cuda() as usage:
        model = load_fake(shape)
        cache = model.new_cache(4096)
        cache.length = 3000
        launches = run(usage, model, cache, tokens)
    attention = sum(count for name, count in launches.items() if name in ATTENTION)
    assert usage.to_host == 0
    assert sum(launches.values()) - attention <= (OUTSIDE if with_triton else 2 * BY_TORCH) * LAYERS
    if with_triton:
        assert attention == 2 * LAYERS


def layer_launches(run):
    """Return the launches of a layer of what `run` does, given a number of layers."""
    few, many = (sum(run(layers).values()) for layers in (2, 3))
    return many - few


@pytest.mark.parametrize("case", ["resident", "two GPUs", "offloaded"])
def test_plans_count_the_launches_of_a_layer(tiered, monkeypatch, case):
    """Those of pages apart, of which a plan counts the seconds."""
    monkeypatch.setattr(triton, "serves", lambda q: q.device == GPU and len(q) <= triton.ROWS)
    wanted = {
        "resident": roofline.LAUNCHES,
        "two GPUs": roofline.LAUNCHES + roofline.REDUCED_LAUNCHES,
        "offloaded": roofline.LAUNCHES + roofline.AWAY_LAUNCHES,
    }

    def launched(layers):
        with fake_cuda() as usage:
            group = TwoRanks(usage) if case == "two GPUs" else ALONE
            model = load_fake(fake_shape("8B", layers), group=group)
            cache = tiered(model, resident=0) if case == "offloaded" else model.new_cache(4096)
            launches = run(usage, model, cache, 1)
            if case == "offloaded":
                launches["attend"] -= layers * (CONTEXT // cache.store.tiers.format.tokens)
            return launches

    assert layer_launches(launched) == wanted[case]


@pytest.mark.daily("33")
@pytest.mark.parametrize("tokens", [1, 33])
def test_a_streamed_packed_page_is_one_launch_and_three_quarters_of_the_bytes(tiered, monkeypatch, tokens):
    monkeypatch.setattr(triton, "serves", lambda q: q.device == GPU and len(q) <= triton.ROWS)
    found = {}
    for kv in (BF16, "packed"):
        with fake_cuda() as usage:
            model = load_fake(fake_shape("8B", LAYERS))
            cache = tiered(model, kv=kv)
            launches = run(usage, model, cache, tokens)
            found[kv] = cache.store.tiers.link.statistics.bytes
            span = cache.store.page_tokens
        assert usage.to_host == 0
    pages, away = CONTEXT // span, LAYERS - RESIDENT
    assert launches["attend_runs"] == away * pages
    assert launches["finish"] == LAYERS and launches["attend"] <= 2 * LAYERS
    others = sum(count for name, count in launches.items() if name not in {*ATTENTION, "attend_runs"})
    assert others <= 2 * BY_TORCH * LAYERS
    assert found["packed"] / found[BF16] == pytest.approx(0.7578, abs=0.02)


@pytest.mark.daily("33")
@pytest.mark.parametrize("tokens", [1, 33])
def test_in_planes_a_pass_copies_a_quarter_and_a_draft_nothing_in_one_launch_a_layer(tiered, monkeypatch, tokens):
    monkeypatch.setattr(triton, "serves", lambda q: q.device == GPU and len(q) <= triton.ROWS)
    with fake_cuda() as usage:
        model = load_fake(fake_shape("8B", LAYERS))
        full = tiered(model, kv="packed", mode="planes")
        verified = run(usage, model, full, tokens)
        tiers, away = full.store.tiers, LAYERS - RESIDENT
        copied = tiers.link.statistics.bytes
        cache = PlaneCache(full, RecencySelector(16, 128), Refresh(None), full.capacity, 128, 128)
        cache.adopt()
        drafted = run(usage, model, cache, tokens)
    assert usage.to_host == 0 and tiers.link.statistics.bytes == copied
    pages = CONTEXT // tiers.format.tokens
    assert verified["attend_runs"] == away * pages and drafted["attend_runs"] == away
    assert drafted["attend"] <= 2 * LAYERS and drafted["finish"] == LAYERS
    others = sum(count for name, count in drafted.items() if name not in {*ATTENTION, "attend_runs"})
    assert others <= 2 * BY_TORCH * LAYERS
    ahead = sum(buffer.nbytes for buffer in tiers.ring.buffers)  # of the next pass
    assert copied - ahead < 1.05 * away * pages * tiers.format.numbers // 2 <= 1.05 * copied


def prefill(usage, model, cache, tokens, chunk=2048):
    """Run a prefill layer by layer; return what it launches, and the most bytes that it takes."""
    ids = torch.zeros(tokens, dtype=torch.long, device=GPU)
    before, usage.peak = usage.now, usage.now
    with usage.of() as launches:
        list(model.forward_by_layers(ids, cache, chunk))
    return launches, usage.peak - before


@pytest.mark.daily("8B")
def test_a_prefill_by_layers_takes_no_more_than_its_parts(shape, tiered):
    start, tokens, chunk = 3000, 6000, 2048
    with fake_cuda() as usage:
        model = load_fake(shape)
        cache = tiered(model, start, tokens)
        page = cache.store.tiers.format.tokens
        cache.store.keep_mean_keys(16)
        buffers = prefill_bytes(shape, start + tokens, chunk, page, 2)
        before = usage.now
        cache.store.begin(start, tokens, chunk)
        assert usage.now - before == buffers
        cache.store.tiers.recover()
        cache.store._prefill = None
        assert usage.now == before
        _, peak = prefill(usage, model, cache, tokens, chunk)
    rows, means = tokens * shape.hidden * 2, mean_key_bytes(shape, start + tokens, 16, 2)
    assert buffers + rows < peak
    assert peak <= buffers + rows + means + activation_bytes(shape, start + tokens, chunk, 2, copies=False)
