"""A GPU's quantised keys and values over tiers, in Triton's interpreter: what the native kernel's store does."""

import pytest
import torch

from offload.architecture.pages import host_page_bytes, open_slots, staging_bytes
from offload.caches.full import FullCache
from offload.kernels.ops import TorchOperations
from offload.kernels.triton import ops
from offload.memory.device_quantized_store import DeviceQuantizedStore
from offload.memory.factory import TieredStoreFactory
from offload.memory.quantized_store import QuantizedStore
from offload.memory.tree_attention import tree_of
from tests.support.offloading import CPU, make_link, native_kernel, random_delays, settings
from tests.support.stores import new_rope, projected, tiny_shape

pytest.importorskip("triton")
CAPACITY, PAGE = 320, 128  # tokens
IDS = [(7 * position) % 251 for position in range(320)]
LAYER = 2  # one of three, behind a resident one at most; the others stay empty: the interpreter is slow


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
    assert isinstance(store if resident == "0" else store.tiered, DeviceQuantizedStore)
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


def test_what_it_allocates_is_what_is_counted():
    store, shape = filled("stream 1").store, tiny_shape()
    layers = shape.layers - 1
    assert store.tiers.pages.nbytes == host_page_bytes(shape, layers, CAPACITY, PAGE, 4, "q8")
    staged = store.tiers.open.nbytes + sum(buffer.nbytes for buffer in store.tiers.ring.buffers)
    assert staged <= staging_bytes(shape, layers, 2, PAGE, 4, "q8", open_slots(100, PAGE, "q8"))
    assert len(store.resident.groups.memory) == 1
