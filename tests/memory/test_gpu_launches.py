"""What a pass on a GPU launches, copies and waits for, seen on fake tensors of real shapes."""

import pytest
import torch

from offload.architecture.footprint import activation_bytes
from offload.architecture.kv_formats import format_bytes
from offload.architecture.tier_footprint import mean_key_bytes, paged_prefill_bytes, plain_prefill_bytes
from offload.batching.passes import JointCache
from offload.caches.plane import PlaneCache
from offload.caches.selection import RecencySelector, Refresh
from offload.kernels import triton
from offload.memory import factory, page_prefill
from offload.memory.factory import TieredStoreFactory
from offload.memory.tier_settings import TierSettings
from offload.parallel import ALONE, Alone
from offload.planning import roofline
from offload.settings.kv_formats import EXACT
from offload.speculation.passes.steps import Step
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

    def new(model, tokens=CONTEXT, room=4096, kv=EXACT, resident=RESIDENT, mode="stream"):
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


@pytest.mark.parametrize("case", ["resident", "two GPUs", "two sequences", "offloaded"])
def test_plans_count_the_launches_of_a_layer(tiered, monkeypatch, case):
    """Those of pages apart, of which a plan counts the seconds."""
    monkeypatch.setattr(triton, "serves", lambda q: q.device == GPU and len(q) <= triton.ROWS)
    wanted = {
        "resident": roofline.LAUNCHES,
        "two GPUs": roofline.LAUNCHES + roofline.REDUCED_LAUNCHES,
        "two sequences": roofline.LAUNCHES + roofline.SEQUENCE_LAUNCHES + 1,  # the first is copied, too
        "offloaded": roofline.LAUNCHES + roofline.AWAY_LAUNCHES,
    }

    def launched(layers):
        with fake_cuda() as usage:
            group = TwoRanks(usage) if case == "two GPUs" else ALONE
            model = load_fake(fake_shape("8B", layers), group=group)
            ids = torch.zeros(2, dtype=torch.long, device=GPU)
            if case == "offloaded":
                cache = tiered(model, resident=0)
                launches = run(usage, model, cache, 1)
                launches["attend"] -= layers * (CONTEXT // cache.store.tiers.format.tokens)
                return launches
            caches = [model.new_cache(4096) for _ in range(2)]
            if case != "two sequences":
                return run(usage, model, caches[0], 1)
            for cache in caches:
                cache.begin(1)
            with usage.of() as launches:
                model.through(ids, JointCache([Step(model, cache, ids[:1], 1) for cache in caches]))
            return launches

    assert layer_launches(launched) == wanted[case]


@pytest.mark.daily("7B-q4-1", "8B-q6-33")
@pytest.mark.parametrize(("level", "tokens"), [("q4", 1), ("q6", 33)])
def test_a_step_with_quantised_weights_launches_as_little(shape, monkeypatch, level, tokens):
    monkeypatch.setattr(triton, "serves", lambda q: q.device == GPU)
    monkeypatch.setattr(triton, "serves_quantized", lambda device: device == GPU)
    with fake_cuda() as usage:
        model = load_fake(shape, level=level)
        cache = model.new_cache(4096)
        cache.length = 3000
        launches = run(usage, model, cache, tokens)
    attention = sum(count for name, count in launches.items() if name in ATTENTION)
    assert usage.to_host == 0
    assert launches["quantized_product"] == 4 * LAYERS + 1
    assert launches["add_splits"] <= 4 * LAYERS + 1
    assert launches["mm"] == launches["dequantize"] - 1 == 0  # the embedding's rows
    assert sum(launches.values()) - attention <= (OUTSIDE + SPLITS) * LAYERS


@pytest.mark.parametrize(("length", "tokens"), [(3000, 1), (3060, 33)])
def test_a_step_over_quantised_keys_and_values_is_one_launch_more(monkeypatch, length, tokens):
    """In a window; across the end of one, the tokens behind it are attended with apart, and it is quantised."""
    monkeypatch.setattr(triton, "serves", lambda q: q.device == GPU and len(q) <= triton.ROWS)
    with fake_cuda() as usage:
        model = load_fake(fake_shape("8B", LAYERS))
        model.kv = "q8"
        cache = model.new_cache(4096)
        cache.length = length
        launches = run(usage, model, cache, tokens)
    windows = 2 if (length + tokens) // 128 > length // 128 else 1
    assert usage.to_host == 0
    assert [launches[name] for name in ("attend", "attend_groups", "finish")] == [windows * LAYERS] * 3
    others = sum(count for name, count in launches.items() if name not in {*ATTENTION, "attend_groups"})
    assert others <= (OUTSIDE if windows == 1 else 4 * BY_TORCH) * LAYERS


@pytest.mark.daily("7B-8")
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
    assert others <= BY_TORCH * LAYERS
    assert tiers.link.statistics.bytes >= away * pages * tiers.format.numbers * 2


@pytest.mark.parametrize("tokens", [1, 33])
def test_a_streamed_page_of_quantised_keys_and_values_is_one_launch(tiered, monkeypatch, tokens):
    monkeypatch.setattr(triton, "serves", lambda q: q.device == GPU and len(q) <= triton.ROWS)
    with fake_cuda() as usage:
        model = load_fake(fake_shape("8B", LAYERS))
        cache = tiered(model, kv="q8")
        launches = run(usage, model, cache, tokens)
        tiers = cache.store.tiers
    pages, away = CONTEXT // tiers.format.tokens, LAYERS - RESIDENT
    assert usage.to_host == 0
    assert launches["attend_groups"] <= away * (pages + 1) + RESIDENT
    assert launches["finish"] == launches["attend"] == LAYERS
    others = sum(count for name, count in launches.items() if name not in {*ATTENTION, "attend_groups"})
    assert others <= BY_TORCH * LAYERS
    ahead = sum(buffer.nbytes for buffer in tiers.ring.buffers)  # of the next pass
    size = format_bytes(cache.store.shape, "q8", tiers.format.tokens, 2)
    assert tiers.link.statistics.bytes - ahead < 1.1 * away * pages * size


@pytest.mark.daily("33")
@pytest.mark.parametrize("tokens", [1, 33])
def test_a_streamed_packed_page_is_one_launch_and_three_quarters_of_the_bytes(tiered, monkeypatch, tokens):
    monkeypatch.setattr(triton, "serves", lambda q: q.device == GPU and len(q) <= triton.ROWS)
    found = {}
    for kv in (EXACT, "packed"):
        with fake_cuda() as usage:
            model = load_fake(fake_shape("8B", LAYERS))
            cache = tiered(model, kv=kv)
            launches = run(usage, model, cache, tokens)
            found[kv] = cache.store.tiers.link.statistics.bytes
            span = cache.store.span
        assert usage.to_host == 0
    pages, away = CONTEXT // span, LAYERS - RESIDENT
    assert launches["attend_runs"] == away * pages
    assert launches["finish"] == LAYERS and launches["attend"] <= 2 * LAYERS
    others = sum(count for name, count in launches.items() if name not in {*ATTENTION, "attend_runs"})
    assert others <= 2 * BY_TORCH * LAYERS
    assert found["packed"] / found[EXACT] == pytest.approx(0.7578, abs=0.02)


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


@pytest.mark.long
def test_without_triton_the_same_pass_runs_on_torchs_kernels(shape, tiered, monkeypatch):
    monkeypatch.setattr(triton, "serves", lambda q: False)
    with fake_cuda() as usage:
        model = load_fake(shape)
        launches = run(usage, model, tiered(model), 5)
    assert launches["attend"] == 0
    assert launches["_scaled_dot_product_flash_attention"] >= LAYERS
    assert usage.to_host == 0


def accumulator_bytes(shape, rows, page, itemsize):
    """Return the device bytes of attention over streamed pages by torch's operations, for a pass of `rows`.

    The running sum, a page's result and its copy in fp32; queries and results in the order of heads; a page's plain
    keys and values, whose heads are in another order than its blocks'.
    """
    numbers = rows * shape.heads * shape.head_dim
    pages = 2 * format_bytes(shape, EXACT, page, itemsize)
    return numbers * (2 * 4 + 4 * itemsize) + 6 * 4 * rows * shape.heads + pages


@pytest.mark.daily("8B")
def test_the_memory_of_a_prefill_chunk_is_bounded_however_many_pages_lie_before_it(shape, tiered):
    peaks = []
    for context in (CONTEXT // 8, CONTEXT // 4):
        with fake_cuda() as usage:
            model = load_fake(shape)
            cache = tiered(model, context)
            before, usage.peak = usage.now, usage.now
            model.forward(torch.zeros(2048, dtype=torch.long, device=GPU), cache)
            page = cache.store.tiers.format.tokens
        peaks.append(usage.peak - before)
    assert usage.to_host == 0
    assert peaks[0] == peaks[1]
    buffers = paged_prefill_bytes(shape, context, context + 2048, page, 2) + accumulator_bytes(shape, 2048, page, 2)
    assert peaks[1] <= buffers + activation_bytes(shape, context + 2048, 2048, 2, copies=False)


def prefill(usage, model, cache, tokens, chunk=2048):
    """Run a prefill layer by layer; return what it launches, and the most bytes that it takes."""
    ids = torch.zeros(tokens, dtype=torch.long, device=GPU)
    before, usage.peak = usage.now, usage.now
    with usage.of() as launches:
        list(model.forward_by_layers(ids, cache, chunk))
    return launches, usage.peak - before


@pytest.mark.daily("8B-5000")
@pytest.mark.parametrize("start", [0, 5000])
def test_a_prefill_by_layers_attends_once_a_chunk_and_does_nothing_by_page(shape, tiered, start):
    found = {}
    with fake_cuda() as usage:
        model = load_fake(shape)
        for chunks in (2, 3):
            found[chunks], _ = prefill(usage, model, tiered(model, start, 10_000), chunks * 2048)
            assert found[chunks]["_scaled_dot_product_flash_attention"] == chunks * LAYERS
        assert usage.to_host == 0
    assert sum((found[3] - found[2]).values()) <= LAYERS * OUTSIDE + 7
    assert not any("index_put" in name for name in found[3])  # pages are written at once


@pytest.mark.daily("8B")
def test_a_prefill_by_layers_takes_no_more_than_its_parts(shape, tiered):
    start, tokens, chunk = 3000, 6000, 2048
    with fake_cuda() as usage:
        model = load_fake(shape)
        cache = tiered(model, start, tokens)
        page = cache.store.tiers.format.tokens
        cache.store.keep_mean_keys(16)
        buffers = plain_prefill_bytes(shape, start + tokens, chunk, page, 2)
        before = usage.now
        cache.store.begin(start, tokens, chunk)
        assert usage.now - before == buffers
        cache.store.tiers.recover()
        cache.store.far._plain_prefill = None
        assert usage.now == before
        _, peak = prefill(usage, model, cache, tokens, chunk)
    rows, means = tokens * shape.hidden * 2, mean_key_bytes(shape, start + tokens, 16, 2)
    assert buffers + rows < peak
    assert peak <= buffers + rows + means + activation_bytes(shape, start + tokens, chunk, 2, copies=False)
