"""A GPU's quantised keys and values over tiers, in Triton's interpreter: what the native kernel's store does."""

import random

import pytest
import torch

from offload.architecture.tier_footprint import host_page_bytes, open_slots, staging_bytes
from offload.caches.full import FullCache
from offload.kernels.ops import TorchOperations
from offload.kernels.triton import ops
from offload.memory.device_quantized_store import DeviceQuantizedStore
from offload.memory.factory import TieredStoreFactory
from offload.memory.link import TransferFailed
from offload.memory.quantized_store import QuantizedStore
from offload.memory.tree_attention import tree_of
from tests.support.offloading import CPU, make_link, native_kernel, random_delays, settings
from tests.support.stores import new_rope, projected, tiny_shape

pytest.importorskip("triton")
CAPACITY, PAGE = 320, 128  # tokens
IDS = [(7 * position) % 251 for position in range(320)]
LAYER = 2  # one of three, behind a resident one at most; the others stay empty: the interpreter is slow
PLACES = ["stream 1", "host 0", "hybrid 0"]


@pytest.fixture(autouse=True)
def one_split(monkeypatch):
    """The interpreter is slow."""
    monkeypatch.setattr(ops, "useful_splits", lambda *_: 1)


def tiered(place, kind="q8", before=None):
    """A GPU's cache over tiers; every copy is late, and poisons its target until it comes."""
    mode, resident = place.split()
    tiers = settings(mode, int(resident), page_tokens=PAGE)
    link = make_link(before=before or random_delays(0))
    store = TieredStoreFactory(TorchOperations(), CPU, tiers, link, kv=kind).new_store(
        tiny_shape(), CAPACITY, torch.float32
    )
    assert isinstance(store if resident == "0" else store.far, DeviceQuantizedStore)
    return FullCache(store, new_rope(torch.float32), CAPACITY)


def caches(place, kind="q8", before=None):
    """Such a cache, and one of the native kernel in one memory."""
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    store = QuantizedStore(native_kernel(), tiny_shape(), CAPACITY, torch.float32, kind)
    return [tiered(place, kind, before), FullCache(store, new_rope(torch.float32), CAPACITY)]


def run(both, ids, tree=None, unseen=0, layer=LAYER):
    """Run a pass in a layer of both caches; their attention is the same. The first `unseen` tokens do not attend."""
    rows = []
    for cache in both:
        cache.begin(len(ids), tree)
        q, k, v = projected(ids, layer, cache.store.dtype)
        if unseen:
            cache.append(layer, q[:unseen], k[:unseen], v[:unseen])
        rows.append(cache.attend(layer, q[unseen:], k[unseen:], v[unseen:]).clone())
        cache.commit() if tree is None else cache.hold()
    for other in rows[1:]:
        torch.testing.assert_close(rows[0], other, rtol=0, atol=1e-3)


@pytest.mark.daily("host 0-q8")
@pytest.mark.parametrize(("place", "kind"), [("stream 1", "q8"), ("host 0", "q8"), ("hybrid 0", "q8")])
def test_chunks_and_single_tokens(place, kind):
    """Of the sink and across the ends of windows and pages, which open and are copied to the host; then a rollback."""
    both = caches(place, kind)
    at = 0
    for tokens, unseen in ((34, 30), (110, 105), (150, 140), (1, 0)):
        run(both, IDS[at : at + tokens], unseen=unseen)
        at += tokens
    assert both[0].store.tiers.num_whole == 2
    assert both[0].store.tiers.num_streamed == {"stream": 2, "host": 0, "hybrid": 1}[place.split()[0]]
    assert [cache.truncate(250) for cache in both] == [250, 250]
    run(both, IDS[:8], unseen=6)
    for own, other in zip(*(cache.store.read(0, 258) for cache in both), strict=True):
        torch.testing.assert_close(own[LAYER], other[LAYER], rtol=0, atol=1e-1)  # a rounded half is another code


@pytest.mark.long
def test_a_long_pass_attends_to_its_own_pages_and_to_those_before():
    both = caches("stream 0", "q8")
    run(both, IDS[:200], unseen=196)
    run(both, IDS[200:])


@pytest.mark.daily("stream 1-250")
@pytest.mark.parametrize(("place", "start"), [("stream 1", 250), ("host 0", 260)])
def test_trees(place, start):
    """One of them crosses the end of a page, behind which a token sees the window quantised."""
    both = caches(place, "q8")
    run(both, IDS[:start], unseen=start - 1)
    parents = (-1, 0, 1, 1, 3, 4, 5, 0, 6, 8)
    for first, end in ((0, 4), (4, 10)):
        run(both, [(5 * index + 3) % 250 for index in range(first, end)], tree_of(parents[:end]))
    for cache in both:
        cache.commit([0, 1, 3, 4, 5, 6, 8])
    run(both, IDS[:2])


def filled(place, tokens=300):
    """A cache with tokens in all layers, none of which have attended."""
    cache = tiered(place)
    for start in range(0, tokens, 100):
        cache.begin(100)
        for layer in range(tiny_shape().layers):
            cache.append(layer, *projected(IDS[start : start + 100], layer))
        cache.commit()
    return cache


@pytest.mark.parametrize("place", ["stream 1", "host 0"])
def test_selected_chunks_and_mean_keys_are_those_of_what_is_read(place):
    """Of the sink, of quantised windows in host memory and in open pages, and of the window under way."""
    store, heads = filled(place).store, tiny_shape().kv_heads
    keys, values = store.read(0, 288)
    rows = torch.arange(tiny_shape().layers * heads).repeat_interleave(4)
    chunks = torch.tensor([0, 1, 3, 8]).repeat(tiny_shape().layers * heads)
    rng = random.Random(0)
    order = torch.tensor(rng.sample(range(len(rows)), len(rows)))
    found = store.gather(rows[order], chunks[order], 32)
    for row, chunk, *both in zip(rows[order].tolist(), chunks[order].tolist(), *found, strict=True):
        at = slice(32 * chunk, 32 * chunk + 32)
        for own, whole in zip(both, (keys, values), strict=True):
            exact = whole[row // heads, row % heads, at]
            assert (own - exact).abs().max() <= (0 if chunk in (0, 8) else 0.5)  # a newer window may be as it was
    for layer in range(tiny_shape().layers):
        means = keys[layer, :, 32:256].unflatten(1, (-1, 32)).mean(2)
        torch.testing.assert_close(store.mean_keys(layer, 32, 256, 32), means, rtol=0, atol=0.3)


def test_windows_are_loaded_as_they_were_dumped():
    full, other = filled("stream 1"), tiered("host 0")
    dumps = [full.store.dump(start, start + 128) for start in (0, 128)]
    for kv in dumps:
        other.restore(128, kv)
    for start, kv in zip((0, 128), dumps, strict=True):
        assert torch.equal(other.store.dump(start, start + 128), kv)


def test_what_it_allocates_is_what_is_counted():
    store, shape = filled("stream 1").store, tiny_shape()
    layers = shape.layers - 1
    assert store.tiers.pages.nbytes == host_page_bytes(shape, layers, CAPACITY, PAGE, 4, "q8")
    staged = store.tiers.open.nbytes + sum(buffer.nbytes for buffer in store.tiers.ring.buffers)
    assert staged <= staging_bytes(shape, layers, 2, PAGE, 4, "q8", open_slots(100, PAGE, "q8"))
    assert len(store.resident.groups.memory) == 1


def test_copies_that_keep_failing_raise_and_the_next_pass_is_right():
    failing = []

    def fail(pairs):
        if failing:
            raise OSError("the cable is loose")

    both = caches("stream 0", before=fail)
    run(both, IDS[:140], unseen=139)
    run(both, IDS[140:280], unseen=139)
    failing.append(True)
    with pytest.raises(TransferFailed, match="the cable is loose"):
        decode(both[0])
    failing.clear()
    assert [cache.truncate(280) for cache in both] == [280, 280]
    run(both, IDS[280:283])


def decode(cache):
    """Run some passes: copies that were in flight before the link failed succeed."""
    for _ in range(3):
        run([cache], [1, 2])
        cache.truncate(280)
