"""The retrieval cache: what it attends to, what it copies, and that it follows the full cache through everything."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.architecture.rope import rotate
from offload.kernels.attention import attend
from offload.kv_cache.retrieval import CopiedCache
from offload.kv_cache.selection import RecencySelector, Refresh, RetrievalSelector
from offload.loading.safetensors import FolderCheckpoint
from offload.loading.weights import load_model
from offload.sequence import TokenSequence
from offload.speculation.runner import Runner, SelectedRunner
from tests.support.models import make_hf_model

CHUNK, BUDGET, TAIL, SINK = 4, 24, 32, 4


def load(tmp_path_factory, **changes):
    folder = tmp_path_factory.mktemp("model")
    make_hf_model("llama", vocab_size=32, **changes).save_pretrained(folder)
    return load_model(FolderCheckpoint(folder), torch.float32, torch.device("cpu"), lambda done, total: None)


@pytest.fixture(scope="module", params=[2, 4], ids=["GQA", "MHA"])
def model(request, tmp_path_factory):
    return load(tmp_path_factory, num_key_value_heads=request.param)


def pair(model, every=None, selector=RetrievalSelector, budget=BUDGET, capacity=400):
    full = Runner(model, model.new_cache(capacity), 64)
    cache = CopiedCache(full.cache, selector(SINK, CHUNK), Refresh(every), budget, CHUNK, TAIL)
    return full, SelectedRunner(full, cache)


def ids(count, seed=0):
    return torch.randint(0, 32, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefilled(model, count=150, **options):
    full, middle = pair(model, **options)
    sequence = TokenSequence(ids(count))
    list(full.prefill(sequence))
    return full, middle, sequence


def chosen(cache):
    return cache._chosen.sort(dim=-1).values


def test_a_context_within_the_budget_gives_the_full_cache_s_rows(model):
    full, middle, sequence = prefilled(model, 100, budget=400)
    for token in ids(20, 1):
        assert torch.allclose(middle.rows(sequence), full.rows(sequence), atol=1e-4)
        sequence.extend([token])
        sequence.commit()


def test_chunks_are_those_with_the_largest_score_of_the_newest_query(model):
    full, middle, sequence = prefilled(model)
    middle.rows(sequence)
    length = 149 // CHUNK * CHUNK
    keys = full.cache.store.read(0, length)[0].unflatten(2, (-1, CHUNK)).mean(3)
    query = full.cache.query().unflatten(1, (model.shape.kv_heads, -1))  # [layers, kv_heads, group, head_dim]
    scores = torch.einsum("lkgd,lkcd->lkgc", query, keys).mean(2).flatten(0, 1)
    scores[:, 0] = scores[:, -1] = torch.inf
    expected = scores.topk(BUDGET // CHUNK).indices.sort(dim=-1).values
    assert torch.equal(chosen(middle.cache), expected)


def test_the_newest_query_is_that_of_the_last_committed_token(model):
    full, _, sequence = prefilled(model, 50)
    sequence.extend([1])
    full.rows(sequence, [2, 3, 4])
    sequence.extend([2, 9])  # one of three accepted
    full.settle(sequence)
    found = full.cache.query()
    other = Runner(model, model.new_cache(100))
    other.cache.keep_queries()
    other.rows(TokenSequence(sequence.tokens[:-1]))
    assert torch.allclose(found, other.cache.query(), atol=1e-4)


def test_attention_is_over_the_chosen_chunks_and_the_tail(model):
    full, middle, sequence = prefilled(model)
    middle.rows(sequence)  # the last token is run on what was selected before it
    cache, seen = middle.cache, {}
    cache.begin(1)
    q, k, v = (torch.randn(1, n, model.shape.head_dim) for n in (4, model.shape.kv_heads, model.shape.kv_heads))
    found = cache.attend(1, q, k, v)
    keys, values = full.cache.store.read(0, 150)
    rows = full.cache.rope.rows(150, 151)
    for head, chunks in enumerate(cache._chosen.unflatten(0, (model.shape.layers, -1))[1]):
        places = [p for c in chunks.tolist() for p in range(c * CHUNK, (c + 1) * CHUNK)] + [148]
        own = cache._position(149)  # it has run token 149 itself
        parts = [(keys[1, head, places], values[1, head, places])]
        parts.append((cache.store._keys[1, head, own : own + 1], cache.store._values[1, head, own : own + 1]))
        parts.append((rotate(k, rows)[:, head], v[:, head]))
        seen[head] = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    expected = attend(rotate(q, rows), *(torch.stack([seen[head][i] for head in sorted(seen)]) for i in range(2))).out
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_new_selection_copies_only_what_is_new(model):
    full, middle, sequence = prefilled(model, every=1)
    middle.rows(sequence)
    before, copied = chosen(middle.cache), middle.cache.copied_chunks
    assert copied == before.numel()
    for token in ids(6, 2):
        sequence.extend([token])
        sequence.commit()
        full.rows(sequence)
    middle.rows(sequence)
    after = chosen(middle.cache)
    new = sum(len(set(b.tolist()) - set(a.tolist())) for a, b in zip(before, after, strict=True))
    assert middle.cache.copied_chunks - copied == new < after.numel()
    assert_holds_the_full_cache_s(middle.cache, full.cache)


def assert_holds_the_full_cache_s(cache, full):
    """Every slot holds its chunk, and the tail what the full cache has behind the chunks."""
    for ours, theirs in zip((cache.store._keys, cache.store._values), full.store.read(0, full.length), strict=True):
        ours, theirs = ours.flatten(0, 1), theirs.flatten(0, 1)
        for row, chunks in enumerate(cache._chosen):
            for slot, chunk in enumerate(chunks.tolist()):
                here, there = slot * CHUNK, chunk * CHUNK
                assert torch.equal(ours[row, here : here + CHUNK], theirs[row, there : there + CHUNK])
        start = cache._chosen.shape[1] * CHUNK
        tail = theirs[:, cache._start : cache._exact]
        assert torch.equal(ours[:, start : start + tail.shape[1]], tail)


def test_the_streaming_choice_is_the_sink_and_the_latest(model):
    _, middle, sequence = prefilled(model, selector=RecencySelector)
    middle.rows(sequence)
    assert set(map(tuple, chosen(middle.cache).tolist())) == {(0, 32, 33, 34, 35, 36)}


def test_a_stride_selects_again_every_so_many_tokens(model):
    full, middle, sequence = prefilled(model, every=8)
    starts = []
    for token in ids(40, 3):
        middle.rows(sequence)
        full.rows(sequence)
        sequence.extend([token])
        sequence.commit()
        starts.append(middle.cache._start)
    assert len(set(starts)) == 5


def test_refresh_is_due_when_acceptance_has_fallen():
    refresh = Refresh(None)
    refresh.start(100)
    for _ in range(5):
        refresh.observe(4, 4)
    assert not refresh.due(120)
    for _ in range(3):
        refresh.observe(4, 0)
    assert refresh.due(140)
    assert not refresh.due(104)  # too soon after the last
    refresh.start(140)
    assert not refresh.due(160)


def test_a_new_selection_drops_what_only_the_small_cache_has_run(model):
    """The next prompt may end in a token that was tried out for the last one."""
    full, middle, sequence = prefilled(model, 150)
    sequence.extend([5])
    middle.rows(sequence)
    sequence.commit()
    middle.renew()
    assert middle.rows(sequence, [7]).shape == (2, model.shape.hidden)
    assert_holds_the_full_cache_s(middle.cache, full.cache)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("cycle"), st.integers(0, 8), st.integers(0, 8)),
        st.tuples(st.just("restart"), st.integers(1, 200), st.integers(0, 3)),
        st.tuples(st.just("plain"), st.integers(1, 20), st.just(0)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.sampled_from([None, 1, 8]))
def test_it_follows_the_full_cache_through_any_history(model, steps, every):
    """After accepted and rejected drafts, steps without it and other prompts, it holds what the full cache holds."""
    full, middle = pair(model, every=every, capacity=800)
    sequence = TokenSequence(ids(90))
    list(full.prefill(sequence))
    for what, first, second in steps:
        if what == "cycle" and len(sequence) < 700:
            draft = ids(first, len(sequence))
            for token in draft:
                middle.rows(sequence)
                sequence.extend([token])
            sequence.truncate(sequence.committed)
            full.rows(sequence, draft)
            sequence.extend([*draft[:second], 1])
            middle.observe(len(draft), min(second, len(draft)))
        elif what == "plain":
            for token in ids(first, 5):
                full.rows(sequence)
                sequence.extend([token])
        elif what == "restart":
            sequence.restart([*sequence.tokens[: first // 2], *ids(first, second)])
            list(full.prefill(sequence))
        sequence.commit()
        full.settle(sequence)
        found = middle.rows(sequence)
        assert_holds_the_full_cache_s(middle.cache, full.cache)
        assert found.isfinite().all()
        assert middle.cache.length == len(sequence) == middle.num_cached
