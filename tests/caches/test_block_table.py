"""The retrieval cache by block table: it attends to the full cache's blocks in place, and never changes them."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.caches.block_table import TableCache
from offload.kernels.native.ops import NativeOperations
from offload.sequence import TokenSequence
from tests.support.offloading import native_kernel
from tests.support.retrieval import CYCLE, INTERRUPT, LOOKUP, PLAIN, RESTART, RetrievalSetup, ids, load, take_step

CHUNK, BUDGET = 16, 96
SETUP = RetrievalSetup(TableCache, CHUNK, BUDGET, capacity=600)


@pytest.fixture(scope="module", params=[(2, torch.float32), (4, torch.bfloat16)], ids=["GQA fp32", "MHA bf16"])
def model(request, tmp_path_factory):
    if native_kernel() is None:
        pytest.skip("there is no native kernel here")
    return load(tmp_path_factory.mktemp("model"), *request.param, NativeOperations(native_kernel()))


def test_selected_chunks_have_the_largest_scores_of_the_newest_query(model):
    full, middle, sequence = SETUP.prefilled(model, 250)
    middle.rows(sequence)
    scores = SETUP.scores(full, 249 // CHUNK)
    found = scores.gather(1, middle.cache.selection).sort().values
    best = scores.topk(BUDGET // CHUNK).values.sort().values
    assert torch.allclose(found, best, rtol=0.02, atol=0.02)  # in bf16 two chunks may tie


def test_drafted_tokens_are_run_again_after_the_full_cache_has_overwritten_them(model):
    """Another drafter's rejected draft has overwritten the keys of this cache's tokens."""
    full, middle, sequence = SETUP.prefilled(model, 100, budget=800)
    sequence.extend([5, 6])
    middle.rows(sequence)  # only the retrieval cache has tokens 100 and 101
    sequence.truncate(sequence.committed)
    full.rows(sequence, [7, 8])  # another draft at the same positions
    full.settle(sequence)
    sequence.extend([5, 6])
    assert torch.equal(middle.rows(sequence, [9]), SETUP.full(model).rows(sequence, [9]))


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(CYCLE, LOOKUP, INTERRUPT, RESTART, PLAIN), min_size=1, max_size=10),
    st.sampled_from([None, 1, 8]),
    st.sampled_from([BUDGET, 800]),
)
def test_it_follows_the_full_cache_through_any_history(model, steps, every, budget):
    """The full cache has a fresh cache's keys and values, bit for bit, whatever was drafted behind its tokens.

    With a budget for everything the retrieval cache gives a fresh full cache's rows, too.
    """
    full, middle = SETUP.pair(model, every=every, budget=budget)
    sequence = TokenSequence(ids(60))
    list(full.prefill(sequence))
    for kind, first, second in steps:
        take_step(full, middle, sequence, ("restart" if len(sequence) > 500 else kind, first, second))
        found = middle.rows(sequence, [3])
        assert middle.cache.length == len(sequence) + 1 == middle.num_cached
        other = SETUP.full(model)
        expected = other.rows(sequence, [3])
        for ours, theirs in zip(*(r.cache.store.read(0, full.num_cached) for r in (full, other)), strict=True):
            assert torch.equal(ours, theirs)
        if budget > len(sequence):
            assert torch.equal(found, expected)
