"""The retrieval cache without copies: it reads the full cache's blocks, and never harms what the full cache holds."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.architecture.rope import rotate
from offload.kernels.attention import attend
from offload.kernels.native import KernelUnavailable, find_kernel
from offload.kernels.native.ops import NativeOperations
from offload.kv_cache.block_table import TableCache
from offload.kv_cache.selection import RecencySelector, Refresh, RetrievalSelector
from offload.loading.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.sequence import TokenSequence
from offload.speculation.runner import Runner, SelectedRunner
from tests.support.models import make_hf_model

CHUNK, BUDGET, TAIL, SINK = 16, 96, 32, 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[(2, torch.float32), (4, torch.bfloat16)], ids=["GQA fp32", "MHA bf16"])
def model(request, tmp_path_factory):
    try:
        operations = NativeOperations(find_kernel())
    except KernelUnavailable as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("model")
    kv_heads, dtype = request.param
    make_hf_model("llama", vocab_size=32, num_key_value_heads=kv_heads).save_pretrained(folder)
    return load_model(FolderCheckpoint(folder), dtype, CPU, lambda done, total: None, operations)


def pair(model, every=None, selector=RetrievalSelector, budget=BUDGET, capacity=600):
    full = Runner(model, model.new_cache(capacity), 64)
    cache = TableCache(full.cache, selector(SINK, CHUNK), Refresh(every), budget, CHUNK, TAIL)
    return full, SelectedRunner(full, cache)


def fresh(model):
    return Runner(model, model.new_cache(600), 64)


def ids(count, seed=0):
    return torch.randint(0, 32, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefilled(model, count=250, **options):
    full, middle = pair(model, **options)
    sequence = TokenSequence(ids(count))
    list(full.prefill(sequence))
    return full, middle, sequence


def chosen(cache):
    """Chunk numbers `[layers * kv_heads, slots]`; with chunks of one block they are the table's first numbers."""
    return cache._table[:, :, : cache._selected // CHUNK].flatten(0, 1).long()


def test_chunks_are_those_with_the_largest_score_of_the_newest_query(model):
    full, middle, sequence = prefilled(model)
    middle.rows(sequence)
    chunks = 249 // CHUNK
    keys = full.cache.store.read(0, chunks * CHUNK)[0].float().unflatten(2, (-1, CHUNK)).mean(3)
    query = full.cache.query().float().unflatten(1, (model.shape.kv_heads, -1)).mean(2)
    means = keys.to(model.dtype).float()
    scores = torch.einsum("lkd,lkcd->lkc", query.to(model.dtype).float(), means).flatten(0, 1)
    scores[:, 0] = scores[:, -1] = torch.inf
    wanted = scores.gather(1, chosen(middle.cache)).sort().values
    best = scores.topk(BUDGET // CHUNK).values.sort().values
    assert torch.allclose(wanted, best, rtol=0.02, atol=0.02)  # in bf16 two may tie


def test_attention_is_over_the_chosen_chunks_and_the_tail(model):
    full, middle, sequence = prefilled(model)
    middle.rows(sequence)
    cache = middle.cache
    cache.begin(1)
    q, k, v = (torch.randn(1, n, model.shape.head_dim).to(model.dtype) for n in (4, *[model.shape.kv_heads] * 2))
    found = cache.attend(1, q, k, v).clone()
    keys, values = full.cache.store.read(0, 251)
    rows = full.cache.rope.rows(250, 251)
    seen = []
    for head in range(model.shape.kv_heads):
        chunks = chosen(cache).unflatten(0, (model.shape.layers, -1))[1, head].tolist()
        places = [p for c in chunks for p in range(c * CHUNK, (c + 1) * CHUNK)] + list(range(cache._start, 251))
        seen.append((keys[1, head, places], values[1, head, places]))
    expected = attend(rotate(q, rows), *(torch.stack(tensors) for tensors in zip(*seen, strict=True))).out
    assert torch.allclose(found.float(), expected.float(), atol=1e-5 if model.dtype == torch.float32 else 2e-2)


def test_the_streaming_choice_is_the_sink_and_the_latest(model):
    _, middle, sequence = prefilled(model, selector=RecencySelector)
    middle.rows(sequence)
    assert set(map(tuple, chosen(middle.cache).tolist())) == {(0, 10, 11, 12, 13, 14)}


def test_what_was_tried_out_is_run_again_once_the_full_cache_has_written_over_it(model):
    """A rejected draft of somebody else's leaves its keys where this cache had put its own."""
    full, middle, sequence = prefilled(model, 100, budget=800)
    sequence.extend([5, 6])
    middle.rows(sequence)  # tokens 100 and 101 are ours alone
    sequence.truncate(sequence.committed)
    full.rows(sequence, [7, 8])  # another draft, in the same place
    full.settle(sequence)
    sequence.extend([5, 6])
    assert torch.equal(middle.rows(sequence, [9]), fresh(model).rows(sequence, [9]))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("cycle"), st.integers(0, 8), st.integers(0, 8)),
        st.tuples(st.just("lookup"), st.integers(1, 8), st.integers(0, 8)),
        st.tuples(st.just("interrupt"), st.integers(1, 8), st.just(0)),
        st.tuples(st.just("restart"), st.integers(1, 200), st.integers(0, 3)),
        st.tuples(st.just("plain"), st.integers(1, 20), st.just(0)),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.sampled_from([None, 1, 8]), st.sampled_from([BUDGET, 800]))
def test_it_follows_the_full_cache_through_any_history(model, steps, every, budget):
    """The full cache holds a fresh cache's keys and values, bit for bit, whatever was tried out in the room behind it.

    With a budget for everything the small one gives a fresh cache's rows, too.
    """
    full, middle = pair(model, every=every, budget=budget)
    sequence = TokenSequence(ids(60))
    list(full.prefill(sequence))
    for what, first, second in steps:
        if len(sequence) > 500:
            what = "restart"
        if what in ("cycle", "lookup"):
            draft = ids(first, len(sequence))
            if what == "cycle":
                for token in draft:
                    middle.rows(sequence)
                    sequence.extend([token])
                sequence.truncate(sequence.committed)
            full.rows(sequence, draft)
            sequence.extend([*draft[:second], 1])
            middle.observe(len(draft), min(second, len(draft)))
        elif what == "interrupt":  # tried out by the small cache, and never judged
            sequence.extend(ids(first, 7))
            middle.rows(sequence)
            sequence.truncate(sequence.committed)
        elif what == "plain":
            for token in ids(first, 5):
                full.rows(sequence)
                sequence.extend([token])
        elif what == "restart":
            sequence.restart([*sequence.tokens[: first // 2], *ids(first, second)])
            list(full.prefill(sequence))
        sequence.commit()
        full.settle(sequence)
        found = middle.rows(sequence, [3])
        assert middle.cache.length == len(sequence) + 1 == middle.num_cached
        other = fresh(model)
        expected = other.rows(sequence, [3])
        for ours, theirs in zip(*(r.cache.store.read(0, full.num_cached) for r in (full, other)), strict=True):
            assert torch.equal(ours, theirs)
        if budget > len(sequence):
            assert torch.equal(found, expected)
