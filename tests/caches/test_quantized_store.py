"""A store of quantised keys and values: attention to what it has, in the same bits however a token is computed."""

import random

import pytest
import torch

from offload.architecture.kv_formats import SINK, WINDOW
from offload.architecture.rope import rotate
from offload.caches.full import FullCache
from offload.memory import quantized_memory, quantized_store
from offload.memory.plain_store import PlainStore
from offload.memory.quantized_store import QuantizedStore
from offload.memory.tree_attention import tree_of
from tests.support.interrupts import interrupted
from tests.support.offloading import CPU, native_kernel
from tests.support.stores import new_rope, projected, tiny_shape

CAPACITY = 320  # of the RoPE of the tests
IDS = [(7 * position) % 251 for position in range(300)]
DTYPES = [torch.float32, torch.bfloat16]
LAYERS = 3


@pytest.fixture(params=["q8"])
def kind(request):
    return request.param


def new_cache(kind="q8", dtype=torch.float32):
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    store = QuantizedStore(native_kernel(), tiny_shape(), CAPACITY, dtype, kind)
    cache = FullCache(store, new_rope(dtype), CAPACITY)
    cache.keep_queries()
    return cache


def run(cache, ids, tree=None, commit=True):
    """Run a pass; return its attention `[layers, tokens, heads, head_dim]`."""
    cache.begin(len(ids), tree)
    rows = [cache.attend(i, *projected(ids, i, cache.store.dtype)).clone() for i in range(LAYERS)]
    if commit:
        cache.commit() if tree is None else cache.hold()
    return torch.stack(rows)


def run_all(cache, ids, passes):
    """Run passes of so many tokens in turn, the last one of what is left; return attention of all of them."""
    rows, at = [], 0
    for tokens in passes:
        rows.append(run(cache, ids[at : at + tokens]))
        at += tokens
        if at >= len(ids):
            break
    return torch.cat(rows, dim=1)


def test_a_token_attends_to_whole_windows_quantised_and_to_its_own(kind):
    cache = new_cache(kind)
    found = run_all(cache, IDS, [90, 3, 60, 147])
    plain = FullCache(PlainStore(tiny_shape(), CAPACITY, torch.float32, CPU), new_rope(torch.float32), CAPACITY)
    run(plain, IDS)
    exact, stored = (x.store.read(0, len(IDS)) for x in (plain, cache))
    steps = 255
    for own, other in zip(stored, exact, strict=True):
        assert torch.equal(own[:, :, :SINK], other[:, :, :SINK])
        assert torch.equal(own[:, :, 2 * WINDOW :], other[:, :, 2 * WINDOW :])
        assert 0 < (own - other).abs().max() < 8 / steps
    for position in (5, WINDOW - 1, WINDOW, 200, 2 * WINDOW - 1, 2 * WINDOW, 299):
        border = position // WINDOW * WINDOW
        keys, values = (
            torch.cat((s[:, :, :border], e[:, :, border : position + 1]), 2) for s, e in zip(stored, exact, strict=True)
        )
        other = PlainStore(tiny_shape(), CAPACITY, torch.float32, CPU)
        other.write(0, keys, values)
        for layer in range(LAYERS):
            q = rotate(projected([IDS[position]], layer)[0], cache.rope.rows(position, position + 1))
            expected = other.attend(layer, q, position)
            assert (found[layer, position] - expected[0]).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_observed_weights_are_those_of_the_dequantised_keys_of_each_tokens_window(kind, dtype):
    """H2O's scores, of queries on both sides of the end of a window."""
    start, tokens, layer = 2 * WINDOW - 20, 44, 1
    cache = new_cache(kind, dtype)
    store, shape = cache.store, tiny_shape()
    run(cache, IDS[:start])
    before = store.read(0, start)[0][layer]
    cache.begin(tokens)
    q, at = cache.append(layer, *projected(IDS[start : start + tokens], layer, dtype))
    q, lse, received = q.clone(), torch.empty(tokens, shape.heads), torch.zeros(shape.kv_heads, CAPACITY)
    store.attend(layer, q, at, lse=lse)
    store.observe(layer, q, at, lse, received)
    own = slice(layer, layer + 1)
    exact = store._read_ring(start // WINDOW * WINDOW, start + tokens, own)[0][0]
    both = torch.cat((before[:, :WINDOW], exact), dim=1), store.read(0, start + tokens)[0][layer]
    expected = torch.zeros_like(received)
    for token in range(tokens):
        end = start + token + 1
        keys = both[start + token >= 2 * WINDOW][:, :end].float()
        scores = torch.einsum("kgd,knd->kgn", q[token].float().unflatten(0, (shape.kv_heads, -1)), keys)
        expected[:, :end] += (scores * shape.head_dim**-0.5).softmax(-1).sum(1)
    torch.testing.assert_close(received, expected, atol=1e-4 if dtype == torch.float32 else 3e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(kind, dtype):
    expected = run_all(new_cache(kind, dtype), IDS, [1] * len(IDS))
    rng = random.Random(0)
    for passes in ([300], [127, 1, 1, 171], [rng.randrange(1, 60) for _ in range(60)]):
        assert torch.equal(run_all(new_cache(kind, dtype), IDS, passes), expected), passes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [0, 100, 120, 126, 128, 250])
def test_a_tree_has_the_bits_of_its_chains(dtype, start):
    """Some of these trees cross the end of a window, behind which a token sees that window quantised."""
    rng = random.Random(start)
    parents = [-1]
    for index in range(1, 24):
        parents.append(rng.choice([index - 1, index - 1, index - 1, rng.randrange(index)]))
    tokens = [(5 * index + 3) % 250 for index in range(24)]
    cache = new_cache("q8", dtype)
    run(cache, IDS[:start]) if start else None
    first = run(cache, tokens[:10], tree_of(tuple(parents[:10])))
    found = torch.cat((first, run(cache, tokens[10:], tree_of(tuple(parents)))), dim=1)
    tree = tree_of(tuple(parents))
    for token in (9, 23, max(range(24), key=lambda index: tree.depths[index])):
        path = tree.path_to(token)
        chain = new_cache("q8", dtype)
        run(chain, IDS[:start]) if start else None
        assert torch.equal(found[:, path], run(chain, [tokens[index] for index in path]))
    # The path is committed, and the sequence goes on as if it was a chain.
    cache.commit(path)
    assert torch.equal(run(cache, IDS[:40]), run(chain, IDS[:40]))


@pytest.mark.parametrize("length", [299, 260, 256, 255, 200, 130, 100, 31, 0])
def test_a_rollback_changes_no_bit(length):
    """Into the newest window, into a quantised one that is still in the ring, and before everything in the ring."""
    cache = new_cache()
    run_all(cache, IDS, [25] * 12)
    left = cache.truncate(length)
    assert left == cache.length and left <= length and length - left < WINDOW
    assert left == length or left % WINDOW == 0
    other = [*IDS[:left], *(250 - token for token in IDS[left:])]
    found = run_all(cache, other[left:], [3, 1, 20] * 20)
    assert torch.equal(found, run_all(new_cache(), other, [300])[:, left:])


@pytest.mark.parametrize("passes", [[200], [6] * 5], ids=["the ring grows", "across a window"])
def test_an_interrupt_changes_no_bit(passes):
    """At lines of passes of which the last one is interrupted; then a rollback, and other tokens."""
    start, tokens = 100, sum(passes)
    kept = 90 if len(passes) == 1 else 100
    other = [*IDS[:kept], *(250 - token for token in IDS[kept:280])]
    expected = run(new_cache(), other)[:, kept:]
    for at in range(0, 10**6, 29):
        cache = new_cache()
        run_all(cache, IDS[:start], [60, 40])
        with interrupted(at, quantized_memory, quantized_store, event="line") as hit:
            run_all(cache, IDS[start : start + tokens], passes)
        left = cache.truncate(kept)
        found = run_all(cache, other[left:], [25, 300])
        assert torch.equal(found[:, kept - left :], expected), hit
        if not hit:
            break
    assert at > 200


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("windows", [(0, 2), (0, 1), (1, 1)])
def test_loaded_windows_have_the_bits_of_those_that_were_run(kind, dtype, windows):
    """Into an empty store, and behind windows that were run; then it goes on, and rolls back."""
    run_before, loaded = windows
    start, end = run_before * WINDOW, (run_before + loaded) * WINDOW
    source, cache = new_cache(kind, dtype), new_cache(kind, dtype)
    run_all(source, IDS, [70] * 5)
    dumped = source.store.dump(start, end)
    assert dumped.shape[:2] == (LAYERS, tiny_shape().kv_heads) and dumped.dtype == torch.uint8
    run(cache, IDS[:270])
    cache.truncate(start)
    cache.restore(end - start, dumped)
    expected = run_all(new_cache(kind, dtype), IDS, [300])
    assert torch.equal(run(cache, IDS[end:]), expected[:, end:])
    assert all(torch.equal(*both) for both in zip(cache.store.read(0, 300), source.store.read(0, 300), strict=True))
    left = cache.truncate(end - 40)
    assert left == end - WINDOW
    assert torch.equal(run(cache, IDS[left:]), expected[:, left:])
