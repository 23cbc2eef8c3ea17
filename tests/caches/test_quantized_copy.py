"""A GPU's retrieval cache of quantised copies, in Triton's interpreter: attention to them, an intact full cache."""

from functools import partial

import pytest
import torch

from offload.architecture.footprint import Where, retrieval_bytes
from offload.architecture.rope import rotate
from offload.caches.factory import selected_cache
from offload.caches.retrieval import CopiedCache, QuantizedCopiedCache
from offload.kernels.attention import attend
from offload.kernels.kv_groups import dequantize_groups
from offload.kernels.triton import ops
from offload.memory.tree_attention import tree_of
from offload.sequence import TokenSequence
from offload.settings.config import Speculation
from offload.settings.method_sizes import KEPT_QUERIES
from offload.speculation.passes.cuda_graphs import StepGraphs
from tests.support.retrieval import RetrievalSetup, ids, load, take_step

pytest.importorskip("triton")
CHUNK, BUDGET, CAPACITY = 32, 96, 320
KINDS = ("q4", "q8", "fp8")
HISTORY = [("cycle", 3, 2), ("lookup", 2, 1), ("interrupt", 2, 0), ("restart", 150, 3), ("plain", 2, 0)]


def setup(kind):
    return RetrievalSetup(partial(QuantizedCopiedCache, kind=kind), CHUNK, BUDGET, CAPACITY)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(tmp_path_factory.mktemp("model"), 2)


@pytest.fixture(autouse=True)
def one_split(monkeypatch):
    """The interpreter is slow."""
    monkeypatch.setattr(ops, "useful_splits", lambda *_: 1)


def draw(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def seen_keys(model, full, cache, layer, end):
    """The selected chunks of a layer, dequantised, and the tail up to `end`: `[kv_heads, tokens, head_dim]`."""
    groups = cache._groups[layer][:, : cache.selection.shape[1]]
    copies = dequantize_groups(groups, model.shape.head_dim, cache._kind, torch.float32)
    tail = full.cache.store.read(cache.tail_start, end)
    return [torch.cat((copy.flatten(1, 2), x[layer]), dim=1) for copy, x in zip(copies, tail, strict=True)]


@pytest.mark.daily("q4")
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_to_quantised_copies_of_the_selected_chunks_and_to_the_tail(model, kind):
    full, middle, sequence = setup(kind).prefilled(model, 200)
    middle.rows(sequence)
    cache, heads = middle.cache, model.shape.kv_heads
    assert cache.selection.shape[1] == BUDGET // CHUNK < cache.tail_start // CHUNK
    cache.begin(2)
    q, k, v = (draw(2, n, model.shape.head_dim, seed=n) for n in (4, heads, heads))
    found = cache.attend(1, q, k, v)
    rows = full.cache.rope.rows(200, 202)
    keys, values = seen_keys(model, full, cache, 1, 200)
    keys, values = (torch.cat((x, new.transpose(0, 1)), 1) for x, new in ((keys, rotate(k, rows)), (values, v)))
    for row in range(2):
        seen = slice(0, keys.shape[1] - 1 + row)
        expected = attend(rotate(q, rows)[row : row + 1], keys[:, seen], values[:, seen]).out
        torch.testing.assert_close(found[row : row + 1], expected, rtol=1e-4, atol=1e-4)
    exact = full.cache.store.read(0, 200)[0][1].unflatten(1, (-1, 8))  # a copy differs by a step at most
    slot = cache.selection.unflatten(0, (model.shape.layers, -1))[1, 0, 0]
    original = exact.flatten(1, 2)[0, slot * CHUNK : slot * CHUNK + CHUNK]
    assert 0 < (keys[0, :CHUNK] - original).abs().max() < (0.5 if kind == "q4" else 0.1)


def test_a_tree_attends_as_the_chains_that_its_paths_are(model):
    _, middle, sequence = setup("q8").prefilled(model, 150)
    middle.rows(sequence)
    cache, heads = middle.cache, model.shape.kv_heads
    q, k, v = (draw(4, n, model.shape.head_dim, seed=n) for n in (4, heads, heads))
    tree = tree_of((-1, 0, 0, 2))
    cache.begin(4, tree)
    found = cache.attend(0, q, k, v).clone()
    cache.truncate(150)
    for token in range(4):
        path = tree.path_to(token)
        cache.begin(len(path))
        expected = cache.attend(0, q[path], k[path], v[path])[-1]
        cache.truncate(150)
        torch.testing.assert_close(found[token], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("static", [False, True], ids=["own size", "fixed shapes"])
def test_it_follows_the_full_cache_through_a_history(model, static):
    """With a budget for everything its rows are nearly a full cache's, whose keys and values it leaves alone."""
    full, middle = setup("q8").pair(model, budget=CAPACITY)
    if static:
        middle.graphs = StepGraphs(model, middle.cache, lambda run: run)
    sequence = TokenSequence(ids(80))
    list(full.prefill(sequence))
    for step in HISTORY:
        take_step(full, middle, sequence, step)
        kept = [x.clone() for x in full.cache.store.read(0, full.num_cached)]
        found = middle.rows(sequence, [3, 4])
        for before, after in zip(kept, full.cache.store.read(0, full.num_cached), strict=True):
            assert torch.equal(before, after)
        torch.testing.assert_close(found, full.rows(sequence, [3, 4]), rtol=0, atol=2e-2)
        full.settle(sequence)


def test_steps_recorded_before_the_first_selection_serve_it(model):
    _, middle, sequence = setup("q4").prefilled(model, 150)
    expected, recorded = middle.rows(sequence, ids(3)), []
    _, middle, sequence = setup("q4").prefilled(model, 150)
    middle.graphs = StepGraphs(model, middle.cache, lambda run: recorded.append(run()) or run)
    middle.graphs.prepare(6)
    assert [len(rows) for rows in recorded] == [1, 2, 4, 8]
    torch.testing.assert_close(middle.rows(sequence, ids(3)), expected, rtol=1e-4, atol=1e-4)
    assert len(recorded) == 4


@pytest.mark.long
def test_fixed_shapes_give_the_rows_of_growing_ones(model):
    found = []
    for static in (False, True):
        _, middle, sequence = setup("q4").prefilled(model, 150)
        if static:
            middle.graphs = StepGraphs(model, middle.cache, lambda run: run)
        found.append([middle.rows(sequence, ids(count, count)) for count in (0, 2, 5)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_it_is_chosen_and_takes_the_bytes_that_are_counted(model):
    sizes = {}
    asked = {"exact": {}, "q4": {"retrieval_kv": "q4"}}
    for kind, more in asked.items():
        full = setup("q8").full(model).cache
        wanted = Speculation("retrieval", budget=256, chunk=8, sink=4, **more)
        cache = selected_cache(full, wanted)
        assert isinstance(cache, QuantizedCopiedCache if more else CopiedCache)
        assert cache.budget == 256
        allocated = cache.store._keys.nbytes + cache.store._values.nbytes
        allocated += cache._groups.nbytes if more else 0
        sizes[kind] = allocated, retrieval_bytes(model.shape, wanted, CAPACITY, 4, Where("cuda"))
    queries = model.shape.layers * KEPT_QUERIES * model.shape.heads * model.shape.head_dim * 4
    assert sizes["q4"][0] == sizes["q4"][1] - queries < 0.6 * sizes["exact"][0]
