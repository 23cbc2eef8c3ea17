"""Quantised keys and values over tiers: the bits of a store in one memory, wherever their pages lie."""

import random
import tempfile
from itertools import product
from pathlib import Path

import pytest
import torch

from offload.architecture.kv_formats import bf16_layer_bytes
from offload.architecture.pages import host_page_bytes, open_slots, staging_bytes
from offload.architecture.rope import Rope
from offload.caches.full import FullCache
from offload.kernels.native.ops import NativeOperations
from offload.memory.disk_link import DiskLink
from offload.memory.factory import TieredStoreFactory
from offload.memory.quantized_store import QuantizedStore
from offload.memory.tier_settings import TierSettings
from offload.memory.tree_attention import tree_of
from offload.prompt_cache.fingerprint import TOKENS
from tests.support.models import ids
from tests.support.offloading import CPU, make_link, native_kernel, random_delays, settings
from tests.support.prompt_cache import LENGTH, engine_on, said
from tests.support.stores import projected, tiny_shape

CAPACITY, PAGE = 1700, 512  # tokens; pages are whole pieces of the kernel, so the bits are those of one memory
IDS = [(7 * position) % 251 for position in range(1600)]
PLACES = ["host 2", "disk 1"]


@pytest.fixture(autouse=True)
def _kernel():
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")


def factory(place, kind, before=None):
    where, resident, mode = (*place.split(), "stream")[:3]
    operations, more = NativeOperations(native_kernel()), {"page_tokens": PAGE}
    if where == "disk":
        tiers, link = settings("stream", int(resident), disk=Path(tempfile.gettempdir()), **more), DiskLink(poison=True)
    else:
        tiers, link = settings(mode, int(resident), **more), make_link(before=before or random_delays(0))
    return TieredStoreFactory(operations, CPU, tiers, link, kv=kind)


def caches(place, kind="q8", dtype=torch.bfloat16, before=None):
    """A cache over tiers, and one in memory."""
    rope = Rope(tiny_shape(), CAPACITY, dtype, CPU)
    stores = (
        factory(place, kind, before).new_store(tiny_shape(), CAPACITY, dtype),
        QuantizedStore(native_kernel(), tiny_shape(), CAPACITY, dtype, kind),
    )
    return [FullCache(store, rope, CAPACITY) for store in stores]


def run(cache, new, tree=None, commit=True):
    cache.begin(len(new), tree)
    layers = range(cache.store.shape.layers)
    rows = [cache.attend(layer, *projected(new, layer, cache.store.dtype)).clone() for layer in layers]
    if commit:
        cache.commit() if tree is None else cache.hold()
    return torch.stack(rows)


def run_all(both, new, passes):
    at = 0
    for tokens in passes:
        found, expected = (run(cache, new[at : at + tokens]) for cache in both)
        assert torch.equal(found, expected), f"{tokens} tokens behind {at}"
        at += tokens


@pytest.mark.parametrize(
    ("place", "kind", "dtype"),
    [
        ("host 0", "q8", torch.bfloat16),
        ("disk 1", "q8", torch.bfloat16),
        ("host 2", "q8", torch.float32),
        ("host 1 hybrid", "q8", torch.bfloat16),
    ],
    ids=str,
)
def test_attention_has_the_bits_of_one_memory(place, kind, dtype):
    """In passes within a page, across its border, and longer than two; then after rollbacks and an aborted pass."""
    both = caches(place, kind, dtype)
    run_all(both, IDS, [500, 1, 30, 1, 700, 5, 3])
    for length, passes in ((1230, [4, 40]), (1020, [5, 300, 1]), (500, [30, 600])):
        left = [cache.truncate(length) for cache in both]
        assert left[0] == left[1]
        for cache in both:
            run(cache, [9] * 200, commit=False)
        run_all(both, [250 - token for token in IDS[left[0] :]], passes)
    start = both[0].length
    for found, expected in zip(*(cache.store.read(3, start) for cache in both), strict=True):
        assert torch.equal(found, expected)
    means = [cache.store.mean_keys(1, 32, 1024, 32) for cache in both]
    assert torch.equal(*means)


@pytest.mark.parametrize(("place", "start"), [*product(PLACES, (508, 1022)), ("host 0 host", 1022)])
def test_a_tree_has_the_bits_of_one_memory(place, start):
    """Also across the end of a window and of a page; the committed path then goes on."""
    rng, parents = random.Random(start), [-1]
    for index in range(1, 24):
        parents.append(rng.choice([index - 1, index - 1, index - 1, rng.randrange(index)]))
    tree, tokens = tree_of(tuple(parents)), [(5 * index + 3) % 250 for index in range(24)]
    both = caches(place)
    run_all(both, IDS, [400, start - 400])
    path = tree.path_to(max(range(24), key=lambda index: tree.depths[index]))
    results = []
    for cache in both:
        first = run(cache, tokens[:10], tree_of(tuple(parents[:10])))
        results.append(torch.cat((first, run(cache, tokens[10:], tree)), dim=1))
        cache.commit(path)
    assert torch.equal(*results)
    run_all(both, IDS, [1, 140, 3])


@pytest.mark.parametrize("disk", [False, True])
def test_prompts_and_methods_over_tiers(model_dir, home, tmp_path, disk):
    """The text is that of one memory; prompts go from one placement to the other."""
    prompt = ids(LENGTH)
    more = {"disk": tmp_path} if disk else {}
    tiers = TierSettings("stream", 1, page_tokens=PAGE, **more)

    def engine(where, placed):
        operations = NativeOperations(native_kernel())
        return engine_on(model_dir, where, placed, operations, torch.bfloat16, kv="q8")

    expected, _ = said(engine(None, None), prompt)
    assert said(engine(home, tiers), prompt) == (expected, 0)
    restored = LENGTH // TOKENS * TOKENS
    for placed, method in ((tiers, "ar"), (None, "ar"), (tiers, "retrieval"), (tiers, "lookup")):
        assert said(engine(home, placed), prompt, method) == (expected, restored)


@pytest.mark.parametrize("place", PLACES)
def test_what_a_store_over_tiers_allocates_is_what_is_counted(place):
    cache, _ = caches(place, "q8")
    for start in range(0, 1600, 400):
        run(cache, IDS[start : start + 400])
    store, shape = cache.store, tiny_shape()
    tiers, layers = store.tiers, shape.layers - store.resident_layers
    pages = tiers.pages.nbytes if isinstance(tiers.pages, torch.Tensor) else tiers.pages.file.size
    assert pages == host_page_bytes(shape, layers, CAPACITY, PAGE, 2, "q8")
    staged = tiers.open.nbytes + sum(buffer.nbytes for buffer in tiers.ring.buffers)
    assert staged <= staging_bytes(shape, layers, len(tiers.ring.buffers), PAGE, 2, "q8", open_slots(400, PAGE, "q8"))
    rings = sum(each.ring.store._blocks.nbytes for each in (store.resident, store.tiered))
    assert rings <= shape.layers * bf16_layer_bytes(shape, CAPACITY, 400, 2)
