"""Plane A of packed pages on the device, and B on the host: drafts read A alone, and verifications have every bit."""

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from offload.architecture.rope import rotate
from offload.caches.plane import PlaneCache
from offload.caches.selection import RecencySelector, Refresh
from offload.kernels import triton
from offload.kernels.attention import attend
from offload.kernels.packed_kv import unpack_runs
from offload.kernels.triton import ops
from offload.memory.factory import TieredStoreFactory
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from offload.speculation.passes.selected_runner import SelectedRunner
from tests.memory import test_device_packed_tiers as on_gpu
from tests.memory.test_device_packed_store import numbers, rope, run
from tests.support.native_kernel import packed_runs
from tests.support.offloading import CPU, make_link, make_model, native_kernel, settings
from tests.support.retrieval import CYCLE, INTERRUPT, LOOKUP, PLAIN, RESTART, TAIL, VOCAB, ids, take_step

pytestmark = pytest.mark.xdist_group("native")
RUN, NEW = 128, 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    return make_model(tmp_path_factory.mktemp("model"), torch.bfloat16, vocab_size=VOCAB)


def stores(model, mode="planes", resident=0):
    """Return a factory of packed stores over a link that is late and poisons."""
    tiers = settings(mode, resident, page_tokens=RUN)
    return TieredStoreFactory(model.operations, CPU, tiers, make_link(), kv="packed")


def full_of(model, mode="planes"):
    store = stores(model, mode).new_store(model.shape, 600, model.dtype)
    return Runner(model, model.new_cache(600, store=store), 64)


def pair(model):
    """Return the runners of an empty full cache in planes, and of one that drafts from plane A."""
    full = full_of(model)
    cache = PlaneCache(full.cache, RecencySelector(4, RUN), Refresh(None), 600, RUN, TAIL)
    return full, SelectedRunner(full, cache)


@pytest.mark.parametrize(("tokens", "drafted"), [(300, 1), (254, 4)], ids=["in a page", "across pages"])
def test_a_draft_attends_to_plane_a_and_to_the_newest_tokens_as_they_are(model, tokens, drafted):
    full, middle = pair(model)
    sequence = TokenSequence(ids(tokens))
    list(full.prefill(sequence))
    middle.rows(sequence)
    cache, sizes = middle.cache, model.shape
    full.cache.store.tiers.ring.drop()  # what is prefetched
    before = full.cache.store.tiers.link.statistics.bytes
    cache.begin(drafted)
    generator = torch.Generator().manual_seed(0)
    q = 20 * torch.randn(drafted, sizes.heads, sizes.head_dim, generator=generator).bfloat16()
    k, v = torch.randn(2, drafted, sizes.kv_heads, sizes.head_dim, generator=generator).bfloat16()
    found = cache.attend(1, q, k, v)[-1:].clone().float()
    assert full.cache.store.tiers.link.statistics.bytes == before, "nothing came over the link"
    end = tokens + drafted
    exact = [x[1].clone() for x in full.cache.store.read(0, end)]
    rounded = [x.clone() for x in exact]
    for start in range(0, tokens // RUN * RUN, RUN):
        some = slice(start, start + RUN)
        runs, _ = packed_runs(*(x[:, some].contiguous() for x in exact))
        rounded[0][:, some], rounded[1][:, some] = unpack_runs(runs, sizes.head_dim, plane=True)
    rotated = rotate(q[-1:], full.cache.rope.rows(end - 1, end))
    expected, other = (attend(rotated, *both).out.float() for both in (rounded, exact))
    assert (found - expected).norm() < (other - expected).norm() / 3


STEPS = st.lists(st.one_of(CYCLE, LOOKUP, INTERRUPT, RESTART, PLAIN), min_size=1, max_size=8)


@examples(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


# A GPU's, in Triton's interpreter


@pytest.fixture
def by_triton(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(ops, "useful_splits", lambda *_: 1)
    monkeypatch.setattr(triton, "serves", lambda q: len(q) <= triton.ROWS)


def test_on_a_gpu_passes_have_the_bits_of_plain_pages_and_drafts_read_plane_a(by_triton):
    """Also of a page that cannot be packed; as many rows as Triton attends with, and more."""
    caches, _ = on_gpu.new_caches(mode="planes")
    run(caches, 0, 250)
    run(caches, 1, 84)
    run(caches, 2, 2, seen=2)
    on_gpu.assert_same(caches)
    store, length = caches[0].store, caches[0].length
    assert store.has_planes and store.tiers.num_whole == 1
    exact = [x[0] for x in store.read(0, length)]
    rounded = [x.clone() for x in exact]
    for some in (slice(0, RUN), slice(RUN, 2 * RUN)):
        runs, _ = packed_runs(*(x[:, some].contiguous() for x in exact))
        for x, part in zip(rounded, unpack_runs(runs, rope().rows(0, 1)[0].shape[-1], plane=True), strict=True):
            x[:, some] = part
    q = 20 * numbers(5, 70)[0]
    expected, other = (attend(q[-1:], *both).out.float() for both in (rounded, exact))
    store.open_draft(length, length)
    for rows in (2, 70):
        found = store.attend_plane(0, q[-rows:], length - rows)[-1:].float()
        assert (found - expected).norm() < (other - expected).norm() / 3


def test_a_page_that_cannot_be_packed_travels_whole_and_is_drafted_from(by_triton):
    caches, _ = on_gpu.new_caches(mode="planes")
    run(caches, 0, 256, is_wild=True)
    run(caches, 1, 2, seen=2)
    assert (0, 0) in caches[0].store.tiers.pages._plain
    run(caches, 2, 2, seen=2)
    store = caches[0].store
    store.open_draft(260, 260)
    assert store.attend_plane(0, numbers(3, 1)[0], 259).isfinite().all()
