"""Keys and values packed without loss: the bits of plain ones, in pages over tiers and in a GPU's memory.

Also plane A of packed pages, from which is drafted. A GPU's part runs in Triton's interpreter, which is slow: one layer
of one head, of whose tokens the last ones attend.
"""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from offload.architecture.rope import Rope, rotate
from offload.caches.full import FullCache
from offload.caches.plane import PlaneCache
from offload.caches.selection import RecencySelector, Refresh
from offload.kernels import triton
from offload.kernels.attention import attend
from offload.kernels.native.ops import NativeOperations
from offload.kernels.ops import TorchOperations
from offload.kernels.packed_kv import unpack_runs
from offload.kernels.triton import ops
from offload.memory.device_packed_store import RUN, DevicePackedStore
from offload.memory.factory import TieredStoreFactory
from offload.memory.host_attention import HostAttention
from offload.memory.page import BlockPageFormat
from offload.memory.plain_store import PlainStore
from offload.memory.tree_attention import tree_of
from offload.sequence import TokenSequence
from offload.settings.kv_formats import BF16
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner
from tests.support.native_kernel import packed_runs
from tests.support.offloading import CPU, make_link, make_model, native_kernel, settings
from tests.support.retrieval import CYCLE, INTERRUPT, LOOKUP, PLAIN, RESTART, TAIL, VOCAB, ids, take_step
from tests.support.stores import tiny_shape

pytestmark = [
    pytest.mark.xdist_group("native"),
    pytest.mark.skipif(native_kernel() is None, reason="there is no native kernel here"),
]
PAGE, CAPACITY = 512, 1500  # tokens
GPU_PAGE = 256  # of smaller ones, packed ones are as large: whole sectors


@pytest.fixture
def interpreted(monkeypatch):
    """Attend to plain keys by Triton as well."""
    pytest.importorskip("triton")
    monkeypatch.setattr(ops, "useful_splits", lambda *_: 1)
    monkeypatch.setattr(triton, "serves", lambda q: len(q) <= triton.ROWS)


class PlainGpuFactory(TieredStoreFactory):
    """Makes on a CPU what a GPU has: blocks that Triton attends to, and sums of the host's results."""

    def _stored_format(self, shape, dtype):
        return BlockPageFormat(shape, GPU_PAGE, native_kernel()), dtype

    def _host(self, format):
        return HostAttention(format, CPU, sums=True)


def gpu_shape(layers=1):
    return replace(tiny_shape(), layers=layers, heads=1, kv_heads=1)


def full_over(store):
    return FullCache(store, Rope(store.shape, CAPACITY, torch.bfloat16, CPU), CAPACITY)


def tiered(on_gpu=False, layers=1, **placement):
    """Return caches of packed pages and of pages as they are."""
    shape = gpu_shape(layers) if on_gpu else tiny_shape()
    operations = TorchOperations() if on_gpu else NativeOperations(native_kernel())
    tiers = settings(page_tokens=GPU_PAGE if on_gpu else PAGE, **placement)
    kinds = (TieredStoreFactory, "packed"), (PlainGpuFactory if on_gpu else TieredStoreFactory, BF16)
    stores = [kind(operations, CPU, tiers, make_link(), kv=kv) for kind, kv in kinds]
    return [full_over(factory.new_store(shape, CAPACITY, torch.bfloat16)) for factory in stores]


def resident(layers=1):
    """Return caches of a GPU's packed and plain stores in one memory."""
    args = gpu_shape(layers), CAPACITY, torch.bfloat16, CPU
    return [full_over(store) for store in (DevicePackedStore(*args, "packed"), PlainStore(*args))]


def numbers(shape, seed, tokens, wild=()):
    """Return q, k and v of each layer; those of `wild` layers' first KV head have exponents that do not fit 4 bits."""
    generator, found = torch.Generator().manual_seed(seed), []
    for layer in range(shape.layers):
        x = torch.randn(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim, generator=generator)
        if layer in wild:
            own = x[:, shape.heads :: shape.kv_heads]
            own *= torch.randint(-40, 1, own.shape, generator=generator).exp2()
        found.append(x.bfloat16().split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1))
    return found


def run(caches, seed, tokens, wild=(), tree=None, commit=True, seen=None):
    """Run a pass in all caches, of which the last `seen` tokens attend; assert that their attention is the same."""
    rows, unseen = [], 0 if seen is None else tokens - seen
    for full in caches:
        full.begin(tokens, tree)
        for layer, qkv in enumerate(numbers(full.store.shape, seed, tokens, wild)):
            if unseen:
                full.append(layer, *(x[:unseen] for x in qkv))
            if seen != 0:
                rows.append(full.attend(layer, *(x[unseen:] for x in qkv)).clone())
        if commit:
            full.commit() if tree is None else full.hold()
    half = len(rows) // len(caches)
    assert all(torch.equal(*both) for both in zip(rows[:half], rows[half:], strict=False))


def grow(caches, seed, parents, keep):
    run(caches, seed, len(parents), tree=tree_of(parents))
    for full in caches:
        full.commit(keep)


def same_bits(ours, theirs):
    return torch.equal(ours.contiguous().view(torch.int16), theirs.contiguous().view(torch.int16))


def assert_same(caches, start=0):
    """Whatever is read from the stores has the same bits."""
    stores, end, shape = [full.store for full in caches], caches[0].length, caches[0].store.shape
    assert all(same_bits(*both) for both in zip(*(store.read(start, end) for store in stores), strict=True))
    chunks = torch.arange(end // 16)
    rows = chunks % (shape.layers * shape.kv_heads)
    assert all(same_bits(*both) for both in zip(*(store.gather(rows, chunks, 16) for store in stores), strict=True))
    assert torch.equal(*(store.mean_keys(0, 0, end // 16 * 16, 16) for store in stores))


# The native kernel, over tiers


@pytest.mark.parametrize("wild", [(), (1,)], ids=["packed", "a layer that cannot be packed"])
@pytest.mark.parametrize("mode", ["stream", "host", "hybrid"])
def test_passes_have_the_bits_of_plain_pages(mode, wild):
    """Of a prompt, single tokens, rollbacks into pages that were packed, and tokens that were restored."""
    caches = tiered(mode=mode)
    for step, tokens in enumerate([1100, 1, 3, -700, 5, 700, -80, 1, 120]):
        if tokens < 0:
            for full in caches:
                full.truncate(full.length + tokens)
        else:
            run(caches, step, tokens, wild)
    assert_same(caches)
    dumps = [full.store.dump(256, 640) for full in caches]
    assert same_bits(*dumps)
    for full, kv in zip(caches, dumps, strict=True):
        full.truncate(256)
        full.restore(384, kv)
    run(caches, 99, 4, wild)


@pytest.mark.parametrize(("wild", "share"), [((), 0.79), ((0, 1, 2), 1.0)])
def test_a_pass_copies_three_quarters_of_the_bytes(wild, share):
    caches, copied = tiered(mode="stream"), []
    run(caches, 0, 1100, wild)
    for full in caches:
        link = full.store.tiers.link
        run([full], 1, 1, wild)
        link.finish(link.copy(()))  # what is prefetched
        before = link.statistics.bytes
        run([full], 2, 1, wild)
        link.finish(link.copy(()))
        copied.append(link.statistics.bytes - before)
    assert 0.95 * share < copied[0] / copied[1] <= share


# Planes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), torch.bfloat16, vocab_size=VOCAB)


def full_of(model, mode="planes"):
    stores = TieredStoreFactory(model.operations, CPU, settings(mode, page_tokens=RUN), make_link(), kv="packed")
    return Runner(model, model.new_cache(600, store=stores.new_store(model.shape, 600, model.dtype)), 64)


def pair(model):
    """Return the runners of an empty full cache in planes, and of one that drafts from plane A."""
    full = full_of(model)
    cache = PlaneCache(full.cache, RecencySelector(4, RUN), Refresh(None), 600, RUN, TAIL)
    return full, SelectedRunner(full, cache)


def assert_reads_plane_a(found, q, exact, whole):
    """Attention of the query behind all tokens is that to `whole` tokens in plane A, and to the others as they are."""
    rounded = [x.clone() for x in exact]
    for start in range(0, whole, RUN):
        some = slice(start, start + RUN)
        runs, _ = packed_runs(*(x[:, some].contiguous() for x in exact))
        for x, part in zip(rounded, unpack_runs(runs, q.shape[-1], plane=True), strict=True):
            x[:, some] = part
    expected, other = (attend(q, *both).out.float() for both in (rounded, exact))
    assert (found.float() - expected).norm() < (other - expected).norm() / 3


@pytest.mark.parametrize(("tokens", "drafted"), [(300, 1), (254, 4)], ids=["in a page", "across pages"])
def test_a_draft_attends_to_plane_a_and_to_the_newest_tokens_as_they_are(model, tokens, drafted):
    full, middle = pair(model)
    sequence = TokenSequence(ids(tokens))
    list(full.prefill(sequence))
    middle.rows(sequence)
    store, shape = full.cache.store, model.shape
    store.tiers.ring.drop()  # what is prefetched
    before = store.tiers.link.statistics.bytes
    middle.cache.begin(drafted)
    generator = torch.Generator().manual_seed(0)
    q = 20 * torch.randn(drafted, shape.heads, shape.head_dim, generator=generator).bfloat16()
    k, v = torch.randn(2, drafted, shape.kv_heads, shape.head_dim, generator=generator).bfloat16()
    found = middle.cache.attend(1, q, k, v)[-1:].clone()
    assert store.tiers.link.statistics.bytes == before, "nothing came over the link"
    end = tokens + drafted
    exact = [x[1].clone() for x in store.read(0, end)]
    assert_reads_plane_a(found, rotate(q[-1:], full.cache.rope.rows(end - 1, end)), exact, tokens // RUN * RUN)


STEPS = st.lists(st.one_of(CYCLE, LOOKUP, INTERRUPT, RESTART, PLAIN), min_size=1, max_size=8)


@examples(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_the_full_cache_keeps_the_bits_of_one_that_nothing_was_drafted_on(model, steps):
    full, middle = pair(model)
    sequence = TokenSequence(ids(250))
    list(full.prefill(sequence))
    for kind, first, second in steps:
        take_step(full, middle, sequence, ("restart" if len(sequence) > 500 else kind, first, second))
        middle.rows(sequence, [3])
        assert middle.cache.length == len(sequence) + 1 == middle.num_cached
    other = full_of(model, "stream")
    expected = other.rows(sequence, [3])
    for ours, theirs in zip(*(each.cache.store.read(0, full.num_cached) for each in (full, other)), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(full.rows(sequence, [3]), expected)


# A GPU, over tiers

PLACES = {"stream": {"mode": "stream"}, "host": {"mode": "host"}, "hybrid": {"mode": "hybrid", "copy_bytes": 2**20}}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.daily("hybrid")
@pytest.mark.parametrize("place", PLACES)
def test_on_a_gpu_passes_have_the_bits_of_plain_pages(place):
    """Of a prompt, of pages that cannot be packed, single tokens, trees, and rollbacks into pages that were packed."""
    caches = tiered(on_gpu=True, **PLACES[place])
    run(caches, 0, 270, seen=1)
    run(caches, 1, 250, [0], seen=1)
    run(caches, 2, 1)
    grow(caches, 3, (-1, 0, 0), [0, 2])
    run(caches, 4, 2)
    tiers = caches[0].store.tiers
    assert tiers.num_whole == 2 and (0, 0) not in tiers.pages._plain and (0, 1) in tiers.pages._plain
    assert_same(caches)
    for full in caches:
        full.truncate(200)
    run(caches, 5, 320, seen=1)
    run(caches, 6, 80, seen=70)  # more rows than Triton attends with
    assert tiers.num_whole == 2 and not {(0, 0), (0, 1)} & {*tiers.pages._plain}
    assert_same(caches)


@pytest.mark.usefixtures("interpreted")
def test_on_a_gpu_planes_have_the_bits_of_plain_pages_and_drafts_read_plane_a():
    """Also of a page that cannot be packed, which travels whole; as many rows as Triton attends with, and more."""
    caches = tiered(on_gpu=True, mode="planes")
    run(caches, 0, 334, seen=1)
    run(caches, 2, 2)
    assert_same(caches)
    store, length = caches[0].store, caches[0].length
    assert store.has_planes and store.tiers.num_whole == 1
    exact = [x[0].clone() for x in store.read(0, length)]
    q = 20 * numbers(store.shape, 5, 70)[0][0]
    store.open_draft(length, length)
    for rows in (2, 70):
        assert_reads_plane_a(store.attend_plane(0, q[-rows:], length - rows)[-1:], q[-1:], exact, GPU_PAGE)
    for full in caches:
        full.truncate(0)
    run(caches, 6, 256, [0], seen=1)
    run(caches, 7, 2)
    assert (0, 0) in store.tiers.pages._plain
    store.open_draft(258, 258)
    assert store.attend_plane(0, q[-1:], 257).isfinite().all()


# A GPU, in one memory


@pytest.mark.usefixtures("interpreted")
def test_in_one_memory_a_sequence_has_the_bits_of_plain_keys():
    """Packed runs, one that does not fit, a rollback into it and into another; a tree across the ring's end."""
    caches = resident()
    for seed, tokens, wild in ((0, 256, ()), (1, 127, [0]), (2, 3, ())):
        run(caches, seed, tokens, wild, seen=1)
    run(caches, 4, 3)
    assert_same(caches)
    grow(caches, 5, (-1, 0, 1, 1, 3), [0, 1, 3, 4])
    for length in (300, 130):
        assert [full.truncate(length) for full in caches] == [length] * 2
        run(caches, 6, 2, seen=1)
        assert_same(caches)


@pytest.mark.long
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("seed", range(12))
def test_in_one_memory_every_history_has_the_bits_of_plain_keys(seed):
    rng, caches = random.Random(seed), resident(2)
    for step in range(25):
        length, wild = caches[0].length, [0, 1] if rng.random() < 0.4 else ()
        kind = rng.choice(["pass", "pass", "long", "truncate", "tree", "abort"])
        tokens = min(rng.choice([1, 3, 20]) if kind != "long" else rng.randrange(100, 300), 700 - length)
        if kind == "truncate" or 700 - length < 40:
            to = rng.choice([max(length - rng.randrange(5), 0), rng.randrange(length + 1), length // RUN * RUN])
            assert [full.truncate(to) for full in caches] == [to, to]
        elif kind == "tree":
            parents = (-1, *(rng.choice([at, rng.randrange(-1, at + 1)]) for at in range(9)))
            grow(caches, step, parents, tree_of(parents).path_to(rng.randrange(10)))
        else:
            run(caches, step, tokens, wild, commit=kind != "abort", seen=1)
        assert_same(caches)
