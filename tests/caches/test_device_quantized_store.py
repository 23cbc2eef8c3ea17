"""A GPU's store of quantised keys and values, in Triton's interpreter: it does what the native kernel's does."""

import pytest
import torch

from offload.caches.full import FullCache
from offload.kernels.triton import ops
from offload.memory.device_quantized_store import DeviceQuantizedStore
from offload.memory.quantized_store import QuantizedStore
from offload.memory.tree_attention import tree_of
from tests.support.offloading import CPU, native_kernel
from tests.support.stores import new_rope, projected, tiny_shape

pytest.importorskip("triton")
CAPACITY = 320  # of the RoPE of the tests
IDS = [(7 * position) % 251 for position in range(300)]
LAYER = 1  # one of three; the others stay empty: the interpreter is slow


def new_caches(kind, dtype=torch.float32):
    """Return a cache of the native kernel's store and one of a GPU's, which are to do the same."""
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    stores = (
        QuantizedStore(native_kernel(), tiny_shape(), CAPACITY, dtype, kind),
        DeviceQuantizedStore(tiny_shape(), CAPACITY, dtype, CPU, kind),
    )
    return [FullCache(store, new_rope(dtype), CAPACITY) for store in stores]


def run(caches, ids, tree=None, unseen=0):
    """Run a pass in a layer of both caches; their attention is the same. The first `unseen` tokens do not attend."""
    rows = []
    for cache in caches:
        cache.begin(len(ids), tree)
        q, k, v = projected(ids, LAYER, cache.store.dtype)
        if unseen:
            cache.append(LAYER, q[:unseen], k[:unseen], v[:unseen])
        rows.append(cache.attend(LAYER, q[unseen:], k[unseen:], v[unseen:]).clone())
        cache.commit() if tree is None else cache.hold()
    assert_same(*rows)


def assert_same(*both, tolerance=None):
    tolerance = tolerance or (3e-2 if both[0].dtype == torch.bfloat16 else 1e-4)
    torch.testing.assert_close(both[1], both[0], rtol=0, atol=tolerance)


def assert_same_content(caches, end, tolerance=None):
    for own, other in zip(*(cache.store.read(0, end) for cache in caches), strict=True):
        assert_same(other[LAYER], own[LAYER], tolerance=tolerance)


@pytest.fixture(autouse=True)
def one_split(monkeypatch):
    """The interpreter is slow."""
    monkeypatch.setattr(ops, "useful_splits", lambda *_: 1)


def test_chunks_and_single_tokens():
    """Of the sink, of its window, across the ends of windows and of the ring; the ring grows; then a rollback."""
    caches = new_caches("q8")
    at = 0
    for tokens, unseen in ((34, 30), (224, 220), (41, 40)):
        run(caches, IDS[at : at + tokens], unseen=unseen)
        at += tokens
    assert at == 299
    assert_same_content(caches, at, tolerance=1e-1)  # a rounded half is another code
    assert [cache.truncate(250) for cache in caches] == [250, 250]
    run(caches, IDS[:8], unseen=7)
    assert_same_content(caches, 258, tolerance=1e-1)


def test_both_observe_the_same_weights():
    """Of queries on both sides of the end of a window."""
    caches, found, tokens = new_caches("q8"), [], 8
    run(caches, IDS[:252], unseen=251)
    for cache in caches:
        store, received = cache.store, torch.zeros(tiny_shape().kv_heads, CAPACITY)
        cache.begin(tokens)
        q, start = cache.append(LAYER, *projected(IDS[252 : 252 + tokens], LAYER))
        q, lse = q.clone(), torch.empty(tokens, tiny_shape().heads)
        store.attend(LAYER, q, start, lse=lse)
        store.observe(LAYER, q, start, lse, received)
        found.append(received)
    assert_same(*found, tolerance=2e-2)  # a rounded half is another code
    torch.testing.assert_close(found[1].sum(1), torch.full((tiny_shape().kv_heads,), 1.0 * tokens * tiny_shape().group))


@pytest.mark.parametrize("start", [5, 250])
def test_trees(start):
    """One of them crosses the end of a window, behind which a token sees that window quantised."""
    caches = new_caches("q8")
    run(caches, IDS[:start], unseen=start - 1)
    parents = (-1, 0, 1, 1, 3, 4, 5, 0, 6, 8)
    for end in (4, 10):
        first = 0 if end == 4 else 4
        run(caches, [(5 * index + 3) % 250 for index in range(first, end)], tree_of(parents[:end]))
    for cache in caches:
        cache.commit([0, 1, 3, 4, 5, 6, 8])
    run(caches, IDS[:2])
    assert_same_content(caches, caches[0].length, tolerance=1e-1)
