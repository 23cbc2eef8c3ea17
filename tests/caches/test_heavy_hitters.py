"""The selection of heavy hitters against its definition, over prompts, selections and rollbacks."""

import pytest
import torch

from offload.caches.retrieval import CopiedCache
from offload.caches.selection import QUERIES, HeavyHitterSelector
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from tests.support.retrieval import RetrievalSetup, ids, load

SETUP = RetrievalSetup(CopiedCache, chunk=4, budget=48, capacity=400)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(tmp_path_factory.mktemp("model"), 2)


def following(model):
    """Make a runner on a full cache, with a selector that follows it."""
    full = Runner(model, model.new_cache(SETUP.capacity), 100)
    full.cache.keep_queries()
    selector = HeavyHitterSelector(4, SETUP.chunk)
    full.cache.followers.add(selector)
    return full, selector


def shares(full, queries):
    """Return the attention that queries `[layers, heads, head_dim]` pay to the chunks so far, `[rows, chunks]`."""
    shape, chunks = full.model.shape, full.cache.length // SETUP.chunk
    keys = full.cache.store.read(0, chunks * SETUP.chunk)[0].unflatten(2, (-1, SETUP.chunk)).mean(3)
    total = 0
    for query in queries:
        grouped = query.unflatten(1, (shape.kv_heads, -1)).mean(2)
        scores = torch.einsum("lkd,lkcd->lkc", grouped, keys) * shape.head_dim**-0.5
        total += scores.softmax(-1).flatten(0, 1)
    return total


def test_the_chunks_with_the_largest_sums_are_selected_beside_sink_and_recent_ones(model):
    full, selector = following(model)
    sequence, received = TokenSequence(ids(300)), torch.zeros(4, 100)
    for event in full.prefill(sequence):
        if event.done:
            queries = full.cache.queries(QUERIES)
            assert len(queries) == QUERIES
            received[:, : event.done // 4] += shares(full, queries)
    slots, chunks = 12, full.cache.length // 4
    found = selector.select(full.cache, chunks, slots)
    received[:, :chunks] += shares(full, full.cache.queries(1))
    received[:, 0] = received[:, chunks - 3 : chunks] = torch.inf
    assert torch.equal(found.sort().values, received.topk(slots).indices.sort().values)


def test_after_another_prompt_only_its_tokens_count(model):
    full, selector = following(model)
    list(full.prefill(TokenSequence(ids(300))))
    sequence = TokenSequence(ids(300, seed=9))
    list(full.prefill(sequence))
    other, fresh = following(model)
    list(other.prefill(sequence))
    for runner in (full, other):
        runner.rows(sequence)
    assert torch.equal(selector.select(full.cache, 75, 12), fresh.select(other.cache, 75, 12))


def test_without_queries_recent_chunks_are_preferred(model):
    full = Runner(model, model.new_cache(SETUP.capacity), 100)
    list(full.prefill(TokenSequence(ids(300))))
    full.cache.keep_queries()
    chosen = HeavyHitterSelector(4, SETUP.chunk).select(full.cache, 75, 12)
    assert set(chosen[0].tolist()) == {0, *range(64, 75)}
