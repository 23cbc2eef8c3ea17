"""The retrieval cache by chunk table: it reads the full cache's plain store, and never changes its tokens."""

import pytest
import torch

from offload.caches import chunk_table
from offload.caches.chunk_table import ChunkTableCache
from offload.sequence import TokenSequence
from offload.speculation.passes.cuda_graphs import StepGraphs
from tests.support.retrieval import RetrievalSetup, attend_table_by_torch, ids, load, take_step

CHUNK, BUDGET, CAPACITY = 4, 24, 600
SETUP = RetrievalSetup(ChunkTableCache, CHUNK, BUDGET, CAPACITY)
HISTORY = [
    ("cycle", 5, 3),
    ("lookup", 4, 1),
    ("interrupt", 6, 0),
    ("cycle", 8, 8),
    ("restart", 80, 3),
    ("lookup", 8, 8),
    ("plain", 20, 0),
    ("cycle", 1, 0),
    ("interrupt", 3, 0),
    ("lookup", 1, 0),
]


@pytest.fixture(scope="module", params=[2, 4], ids=["GQA", "MHA"])
def model(request, tmp_path_factory):
    return load(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture
def without_triton(monkeypatch):
    monkeypatch.setattr(chunk_table, "attend_table", attend_table_by_torch)


@pytest.mark.parametrize("static", [False, True], ids=["own size", "fixed shapes"])
@pytest.mark.parametrize(("every", "budget"), [(None, 800), (1, BUDGET)])
@pytest.mark.usefixtures("without_triton")
def test_it_follows_the_full_cache_through_a_history(model, every, budget, static):
    """The full cache has a fresh cache's keys and values, whatever was drafted behind its tokens.

    With a budget for everything the retrieval cache gives a fresh full cache's rows, too.
    """
    full, middle = SETUP.pair(model, every=every, budget=budget)
    if static:
        middle.graphs = StepGraphs(model, middle.cache, lambda run: run)
    sequence = TokenSequence(ids(60))
    list(full.prefill(sequence))
    for step in HISTORY:
        take_step(full, middle, sequence, step)
        kept = [x.clone() for x in full.cache.store.read(0, full.num_cached)]
        found = middle.rows(sequence, [3, 4, 5])
        assert middle.cache.length == len(sequence) + 3 == middle.num_cached
        for before, after in zip(kept, full.cache.store.read(0, full.num_cached), strict=True):
            assert torch.equal(before, after)
        if budget > len(sequence):
            torch.testing.assert_close(found, SETUP.full(model).rows(sequence, [3, 4, 5]), rtol=1e-3, atol=1e-4)
    other = SETUP.full(model)
    other.rows(sequence)
    for ours, theirs in zip(*(r.cache.store.read(0, full.num_cached) for r in (full, other)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("without_triton")
def test_fixed_shapes_give_the_rows_of_growing_ones(model):
    found = []
    for static in (False, True):
        full, middle, sequence = SETUP.prefilled(model, 150)
        if static:
            middle.graphs = StepGraphs(model, middle.cache, lambda run: run)
        rows = []
        for count in (*range(16), 20, 28):
            rows.append(middle.rows(sequence, ids(count, count)))
            if count % 5 == 4:
                full.rows(sequence, [9] * 3)
                sequence.extend([9, 1])
                sequence.commit()
                full.settle(sequence)
                middle.renew()
        found.append(rows)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("without_triton")
def test_a_pass_longer_than_the_kernel_takes_is_divided(model, monkeypatch):
    monkeypatch.setattr(chunk_table, "ROWS", 5)
    full, middle, sequence = SETUP.prefilled(model, 100, budget=800)
    draft = ids(12, 1)
    torch.testing.assert_close(middle.rows(sequence, draft), full.rows(sequence, draft), rtol=1e-4, atol=1e-4)
