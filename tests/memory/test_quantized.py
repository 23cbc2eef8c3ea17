"""Stores of quantised keys and values: what a token attends to, and that no placement changes it.

In one memory and over tiers the native kernel gives the same bits, in any passes. A GPU's stores, in Triton's
interpreter, give the same numbers up to rounding.
"""

import random
import tempfile
from pathlib import Path

import pytest
import torch

from offload.architecture.kv_formats import WINDOW, bf16_layer_bytes
from offload.architecture.pages import host_page_bytes, open_slots, staging_bytes
from offload.architecture.rope import Rope, rotate
from offload.caches.full import FullCache
from offload.kernels.native.ops import NativeOperations
from offload.kernels.ops import TorchOperations
from offload.kernels.triton import ops
from offload.memory import quantized_memory, quantized_store
from offload.memory.factory import TieredStoreFactory
from offload.memory.plain_store import PlainStore
from offload.memory.tier_settings import TierSettings
from offload.memory.tree_attention import tree_of
from offload.prompt_cache.fingerprint import TOKENS
from tests.support.interrupts import interrupted
from tests.support.models import ids
from tests.support.offloading import CPU, PoisonedDisk, make_link, native_kernel, random_delays, settings
from tests.support.prompt_cache import LENGTH, engine_on, said
from tests.support.stores import projected, tiny_shape

pytestmark = pytest.mark.skipif(native_kernel() is None, reason="there is no native kernel here")
BF16, FP32 = torch.bfloat16, torch.float32
CAPACITY, LAYERS = 1700, 3
PIECE, SMALL = 512, 128  # tokens of a page: whole pieces of the kernel, so the bits are those of one memory; a window
IDS = [(7 * position) % 251 for position in range(1600)]


def new_cache(place="one memory", dtype=FP32, by_triton=False):
    """Return an empty cache; `place` is one memory, or where pages lie, with the resident layers before."""
    shape, rope = tiny_shape(), Rope(tiny_shape(), CAPACITY, dtype, CPU)
    operations = TorchOperations() if by_triton else NativeOperations(native_kernel())
    mode, resident = ("stream", LAYERS) if place == "one memory" else place.split()
    link, more = make_link(before=random_delays(0)), {"page_tokens": SMALL if by_triton else PIECE}
    if mode == "disk":
        mode, link, more = "stream", PoisonedDisk(), more | {"disk": Path(tempfile.gettempdir())}
    stores = TieredStoreFactory(operations, CPU, settings(mode, int(resident), **more), link, kv="q8")
    cache = FullCache(stores.new_store(shape, CAPACITY, dtype), rope, CAPACITY)
    cache.keep_queries()
    return cache


def run(cache, new, tree=None, commit=True, layers=range(LAYERS), unseen=0):
    """Run a pass, of which the first `unseen` tokens do not attend; return `[layers, tokens, heads, head_dim]`."""
    cache.begin(len(new), tree)
    rows = []
    for layer in layers:
        q, k, v = projected(new, layer, cache.store.dtype)
        if unseen:
            cache.append(layer, q[:unseen], k[:unseen], v[:unseen])
        rows.append(cache.attend(layer, q[unseen:], k[unseen:], v[unseen:]).clone())
    if commit:
        cache.commit() if tree is None else cache.hold()
    return torch.stack(rows) if rows else None


def run_all(cache, new, passes):
    """Run passes of so many tokens in turn, the last one of those that are left; return all rows."""
    rows, at = [], 0
    for tokens in passes:
        if at < len(new):
            rows.append(run(cache, new[at : at + tokens]))
            at += tokens
    return torch.cat(rows, dim=1)


def random_tree(nodes, seed):
    rng, parents = random.Random(seed), [-1]
    for index in range(1, nodes):
        parents.append(rng.choice([index - 1, index - 1, index - 1, rng.randrange(index)]))
    return tree_of(tuple(parents)), [(5 * index + 3) % 250 for index in range(nodes)]


def run_tree(cache, tree, tokens):
    """Run a tree in two passes."""
    first = run(cache, tokens[:10], tree_of(tree.parents[:10]))
    return torch.cat((first, run(cache, tokens[10:], tree)), dim=1)


# The native kernel's store in one memory


def test_a_token_attends_to_whole_windows_quantised_and_to_its_own():
    cache, end = new_cache(), 300
    found = run_all(cache, IDS[:end], [90, 3, 60, 147])
    plain = FullCache(PlainStore(tiny_shape(), CAPACITY, FP32, CPU), cache.rope, CAPACITY)
    run(plain, IDS[:end])
    exact, stored = (x.store.read(0, end) for x in (plain, cache))
    for own, other in zip(stored, exact, strict=True):
        assert torch.equal(own[:, :, 2 * WINDOW :], other[:, :, 2 * WINDOW :])
        assert 0 < (own - other).abs().max() < 8 / 255
    for position in (5, WINDOW - 1, WINDOW, 2 * WINDOW - 1, 2 * WINDOW, 299):
        border, other = position // WINDOW * WINDOW, PlainStore(tiny_shape(), CAPACITY, FP32, CPU)
        pairs = zip(stored, exact, strict=True)
        other.write(0, *(torch.cat((s[:, :, :border], e[:, :, border : position + 1]), 2) for s, e in pairs))
        for layer in range(LAYERS):
            q = rotate(projected([IDS[position]], layer)[0], cache.rope.rows(position, position + 1))
            assert (found[layer, position] - other.attend(layer, q, position)[0]).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype):
    expected, rng = run_all(new_cache(dtype=dtype), IDS[:300], [1] * 300), random.Random(0)
    for passes in ([300], [127, 1, 1, 171], [rng.randrange(1, 60) for _ in range(60)]):
        assert torch.equal(run_all(new_cache(dtype=dtype), IDS[:300], passes), expected), passes


@pytest.mark.parametrize("start", [0, 100, 116, 256])
def test_a_tree_has_the_bits_of_its_chains(start):
    """Also where nodes, but no path, reach beyond the end of the window."""
    tree, tokens = random_tree(24, start)
    assert tree.depth <= WINDOW - start % WINDOW
    cache = new_cache(dtype=BF16)
    run_all(cache, IDS[:start], [300]) if start else None
    found = run_tree(cache, tree, tokens)
    for token in (9, 23, max(range(24), key=lambda index: tree.depths[index])):
        path, chain = tree.path_to(token), new_cache(dtype=BF16)
        run_all(chain, IDS[:start], [300]) if start else None
        assert torch.equal(found[:, path], run(chain, [tokens[index] for index in path]))
    cache.commit(path)  # and the sequence goes on as if it was a chain
    assert torch.equal(run(cache, IDS[:40]), run(chain, IDS[:40]))


@pytest.mark.parametrize("length", [299, 256, 255, 130, 31, 0])
def test_a_rollback_changes_no_bit(length):
    """Into the newest window, into a quantised one that is still in the ring, and before everything in the ring."""
    cache = new_cache()
    run_all(cache, IDS[:300], [25] * 12)
    left = cache.truncate(length)
    assert left == cache.length and left <= length and length - left < WINDOW
    assert left == length or left % WINDOW == 0
    other = [*IDS[:left], *(250 - token for token in IDS[left:300])]
    assert torch.equal(run_all(cache, other[left:], [3, 1, 20] * 20), run(new_cache(), other)[:, left:])


@pytest.mark.parametrize("passes", [[200], [6] * 5], ids=["the ring grows", "across a window"])
def test_an_interrupt_changes_no_bit(passes):
    """At lines of passes of which the last one is interrupted; then a rollback, and other tokens."""
    start, kept = 100, 90 if len(passes) == 1 else 100
    other = [*IDS[:kept], *(250 - token for token in IDS[kept:280])]
    expected = run(new_cache(), other)[:, kept:]
    for at in range(0, 10**6, 37):
        cache = new_cache()
        run_all(cache, IDS[:start], [60, 40])
        with interrupted(at, quantized_memory, quantized_store, event="line") as hit:
            run_all(cache, IDS[start : start + sum(passes)], passes)
        left = cache.truncate(kept)
        assert torch.equal(run_all(cache, other[left:], [25, 300])[:, kept - left :], expected), hit
        if not hit:
            break
    assert at > 200


@pytest.mark.parametrize("windows", [(0, 2), (1, 1)])
def test_loaded_windows_have_the_bits_of_those_that_were_run(windows):
    """Into an empty store, and behind windows that were run; then it goes on, and rolls back."""
    start, end = windows[0] * WINDOW, sum(windows) * WINDOW
    source, cache = new_cache(dtype=BF16), new_cache(dtype=BF16)
    expected = run_all(source, IDS[:300], [70] * 5)
    run(cache, IDS[:270])
    cache.truncate(start)
    cache.restore(end - start, source.store.dump(start, end))
    assert torch.equal(run(cache, IDS[end:300]), expected[:, end:])
    assert all(torch.equal(*both) for both in zip(cache.store.read(0, 300), source.store.read(0, 300), strict=True))
    left = cache.truncate(end - 40)
    assert left == end - WINDOW
    assert torch.equal(run(cache, IDS[left:300]), expected[:, left:])


# Over tiers: the bits of one memory


@pytest.mark.parametrize("place", ["host 0", "disk 1", "hybrid 1"])
def test_over_tiers_passes_have_the_bits_of_one_memory(place):
    """Within a page, across its border, and longer than two; then after rollbacks and an aborted pass."""
    both = [new_cache(where, BF16) for where in (place, "one memory")]
    assert torch.equal(*(run_all(cache, IDS[:1240], [500, 1, 30, 1, 700, 5, 3]) for cache in both))
    for length, passes in ((1230, [4, 40]), (1020, [5, 300, 1]), (500, [30, 600])):
        (left,) = {cache.truncate(length) for cache in both}
        for cache in both:
            run(cache, [9] * 200, commit=False)
        new = [250 - token for token in IDS[left : left + sum(passes)]]
        assert torch.equal(*(run_all(cache, new, passes) for cache in both))
    for found, expected in zip(*(cache.store.read(3, both[0].length) for cache in both), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(*(cache.store.mean_keys(1, 32, 1024, 32) for cache in both))


@pytest.mark.parametrize(("place", "start"), [("host 2", 499), ("disk 1", 1010), ("host 0", 1024)])
def test_over_tiers_a_tree_has_the_bits_of_one_memory(place, start):
    """Also where nodes, but no path, reach beyond the end of a page; the committed path then goes on."""
    tree, tokens = random_tree(24, start)
    both, results = [new_cache(where, BF16) for where in (place, "one memory")], []
    for cache in both:
        run_all(cache, IDS[:start], [400, start - 400])
        results.append(run_tree(cache, tree, tokens))
        cache.commit(tree.path_to(max(range(24), key=lambda index: tree.depths[index])))
    assert torch.equal(*results)
    assert torch.equal(*(run_all(cache, IDS[:144], [1, 140, 3]) for cache in both))


@pytest.mark.parametrize("disk", [False, True])
def test_prompts_and_methods_over_tiers(model_dir, home, tmp_path, disk):
    """The text is that of one memory; prompts go from one placement to the other."""
    prompt, tiers = ids(LENGTH), TierSettings("stream", 1, page_tokens=PIECE, disk=tmp_path if disk else None)

    def engine(where, placed):
        return engine_on(model_dir, where, placed, NativeOperations(native_kernel()), BF16, kv="q8")

    expected, _ = said(engine(None, None), prompt)
    assert said(engine(home, tiers), prompt) == (expected, 0)
    for placed, method in ((tiers, "ar"), (None, "ar"), (tiers, "retrieval"), (tiers, "lookup")):
        assert said(engine(home, placed), prompt, method) == (expected, LENGTH // TOKENS * TOKENS)


@pytest.mark.parametrize(("place", "by_triton"), [("host 2", False), ("disk 1", False), ("stream 1", True)])
def test_over_tiers_a_store_allocates_what_is_counted(place, by_triton):
    cache, page = new_cache(place, BF16, by_triton), SMALL if by_triton else PIECE
    for start in range(0, 1600, 400):
        run(cache, IDS[start : start + 400], unseen=399 if by_triton else 0, layers=() if by_triton else range(LAYERS))
    store, shape = cache.store, tiny_shape()
    tiers, layers = store.tiers, shape.layers - store.resident_layers
    pages = tiers.pages.nbytes if tiers.pages.file is None else tiers.pages.file.size
    assert pages == host_page_bytes(shape, layers, CAPACITY, page, 2, "q8")
    staged = tiers.open.nbytes + sum(buffer.nbytes for buffer in tiers.ring.buffers)
    assert staged <= staging_bytes(shape, layers, len(tiers.ring.buffers), page, 2, "q8", open_slots(400, page, "q8"))
    if not by_triton:
        assert store.ring.store._blocks.nbytes <= shape.layers * bf16_layer_bytes(shape, CAPACITY, 400, 2)


# A GPU's stores, in Triton's interpreter, which is slow: passes of one layer, of which few tokens attend


@pytest.fixture
def interpreted(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(ops, "useful_splits", lambda *_: 1)


def run_both(both, new, **more):
    rows = [run(cache, new, layers=[LAYERS - 1], **more) for cache in both]
    torch.testing.assert_close(*rows, rtol=0, atol=1e-3)


LONG = [pytest.param(place, marks=pytest.mark.long) for place in ("stream 1", "hybrid 0")]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("place", ["one memory", "host 0", *LONG])
def test_on_a_gpu_passes_give_what_the_native_kernel_gives(place):
    """Across the ends of windows, of pages and of the ring, which grows; then a rollback, and a tree."""
    both, at = [new_cache(place, by_triton=True), new_cache()], 0
    for tokens, unseen in ((34, 32), (110, 108), (150, 148), (1, 0)):
        run_both(both, IDS[at : at + tokens], unseen=unseen)
        at += tokens
    assert [cache.truncate(250) for cache in both] == [250, 250]
    parents = (-1, 0, 1, 1, 3, 4, 0, 5)
    for first, end in ((0, 4), (4, 8)):
        run_both(both, [(5 * index + 3) % 250 for index in range(first, end)], tree=tree_of(parents[:end]))
    for cache in both:
        cache.commit([0, 1, 3, 4, 5, 7])
    run_both(both, IDS[:2])
    for own, other in zip(*(cache.store.read(0, 258) for cache in both), strict=True):
        torch.testing.assert_close(own[-1], other[-1], rtol=0, atol=1e-1)  # a rounded half is another code
