"""The copied retrieval cache: what it attends to, what it copies, and that it follows the full cache."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.architecture.rope import rotate
from offload.caches.retrieval import CopiedCache
from offload.caches.selection import RecencySelector, Refresh
from offload.kernels.attention import attend
from offload.sequence import TokenSequence
from offload.speculation.passes.runner import Runner
from tests.support.caches import PROMPT, new_subject
from tests.support.retrieval import CYCLE, PLAIN, RESTART, RetrievalSetup, ids, load, take_step
from tests.support.stores import close

CHUNK, BUDGET = 4, 24
SETUP = RetrievalSetup(CopiedCache, CHUNK, BUDGET, capacity=800)


@pytest.fixture(scope="module", params=[2, 4], ids=["GQA", "MHA"])
def model(request, tmp_path_factory):
    return load(tmp_path_factory.mktemp("model"), request.param)


def test_a_context_within_the_budget_gives_the_full_cache_s_rows(model):
    full, middle, sequence = SETUP.prefilled(model, 100, budget=400)
    for token in ids(20, 1):
        assert torch.allclose(middle.rows(sequence), full.rows(sequence), atol=1e-4)
        sequence.extend([token])
        sequence.commit()


def test_selected_chunks_have_the_largest_scores_of_the_newest_query(model):
    full, middle, sequence = SETUP.prefilled(model, 150)
    middle.rows(sequence)
    expected = SETUP.scores(full, 149 // CHUNK).topk(BUDGET // CHUNK).indices.sort(dim=-1).values
    assert torch.equal(middle.cache.selection.sort(dim=-1).values, expected)


def test_the_newest_query_is_that_of_the_last_committed_token(model):
    full, _, sequence = SETUP.prefilled(model, 50)
    sequence.extend([1])
    full.rows(sequence, [2, 3, 4])
    sequence.extend([2, 9])  # one of three accepted
    full.settle(sequence)
    found = full.cache.query()
    other = Runner(model, model.new_cache(100))
    other.cache.keep_queries()
    other.rows(TokenSequence(sequence.tokens[:-1]))
    assert torch.allclose(found, other.cache.query(), atol=1e-4)


def test_attention_is_over_the_selected_chunks_and_the_tail(model):
    full, middle, sequence = SETUP.prefilled(model, 150)
    middle.rows(sequence)  # runs the last token on chunks selected before it
    cache, seen = middle.cache, {}
    cache.begin(1)
    q, k, v = (torch.randn(1, n, model.shape.head_dim) for n in (4, model.shape.kv_heads, model.shape.kv_heads))
    found = cache.attend(1, q, k, v)
    keys, values = full.cache.store.read(0, 150)
    rows = full.cache.rope.rows(150, 151)
    for head, chunks in enumerate(cache.selection.unflatten(0, (model.shape.layers, -1))[1]):
        positions = [p for c in chunks.tolist() for p in range(c * CHUNK, (c + 1) * CHUNK)] + [148]
        own = cache.position_of(149)  # computed by the retrieval cache
        parts = [(keys[1, head, positions], values[1, head, positions])]
        parts.append(tuple(x[1, head] for x in cache.store.read(own, own + 1)))
        parts.append((rotate(k, rows)[:, head], v[:, head]))
        seen[head] = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    expected = attend(rotate(q, rows), *(torch.stack([seen[head][i] for head in sorted(seen)]) for i in range(2))).out
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_new_selection_copies_only_what_is_new(model, monkeypatch):
    full, middle, sequence = SETUP.prefilled(model, 150, every=1)
    gather, copied = full.cache.store.gather, []

    def counted(rows, *rest):
        copied.append(len(rows))
        return gather(rows, *rest)

    monkeypatch.setattr(full.cache.store, "gather", counted)
    middle.rows(sequence)
    before = middle.cache.selection
    assert sum(copied) == before.numel()
    copied.clear()
    for token in ids(6, 2):
        sequence.extend([token])
        sequence.commit()
        full.rows(sequence)
    middle.rows(sequence)
    after = middle.cache.selection
    new = sum(len(set(b.tolist()) - set(a.tolist())) for a, b in zip(before, after, strict=True))
    assert sum(copied) == new < after.numel()
    assert_equals_the_full_cache(middle.cache, full.cache)


def assert_equals_the_full_cache(cache, full):
    """Every slot has its chunk of the full cache, and the tail the tokens behind the chunks."""
    stores = (cache.store.read(0, cache.position_of(cache.exact_end)), full.store.read(0, full.length))
    for ours, theirs in zip(*stores, strict=True):
        ours, theirs = ours.flatten(0, 1), theirs.flatten(0, 1)
        for row, chunks in enumerate(cache.selection):
            for slot, chunk in enumerate(chunks.tolist()):
                here, there = slot * CHUNK, chunk * CHUNK
                assert torch.equal(ours[row, here : here + CHUNK], theirs[row, there : there + CHUNK])
        start = cache.selection.shape[1] * CHUNK
        tail = theirs[:, cache.tail_start : cache.exact_end]
        assert torch.equal(ours[:, start : start + tail.shape[1]], tail)


@pytest.mark.parametrize("length", [145, 143, 129])
def test_tokens_in_place_of_the_full_caches_are_dropped_when_it_is_adopted_again(length):
    """The newest chunk begins at 144, the tail with it."""
    subject = new_subject("retrieval of everything of plain")
    subject.run([1])
    subject.truncate(len(PROMPT))
    for committed in (PROMPT[:length], PROMPT):
        subject.truncate(length)
        subject.cache.adopt() if committed is PROMPT else None
        subject.ids = list(committed)
        assert subject.cache.length == len(committed)
        expected = subject.expected([7, 8])
        assert close(subject.run([7, 8]), expected)


def test_the_recency_selector_takes_the_sink_and_the_latest_chunks(model):
    _, middle, sequence = SETUP.prefilled(model, 150, selector=RecencySelector)
    middle.rows(sequence)
    assert set(map(tuple, middle.cache.selection.sort(dim=-1).values.tolist())) == {(0, 32, 33, 34, 35, 36)}


def test_a_stride_selects_again_after_its_number_of_tokens(model):
    full, middle, sequence = SETUP.prefilled(model, 150, every=8)
    starts = []
    for token in ids(40, 3):
        middle.rows(sequence)
        full.rows(sequence)
        sequence.extend([token])
        sequence.commit()
        starts.append(middle.cache.tail_start)
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


def test_a_new_selection_drops_tokens_that_only_the_retrieval_cache_has_run(model):
    """The next prompt may end in a token that was drafted for the last one."""
    full, middle, sequence = SETUP.prefilled(model, 150)
    sequence.extend([5])
    middle.rows(sequence)
    sequence.commit()
    middle.renew()
    assert middle.rows(sequence, [7]).shape == (2, model.shape.hidden)
    assert_equals_the_full_cache(middle.cache, full.cache)


@pytest.mark.daily("GQA")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(CYCLE, RESTART, PLAIN), min_size=1, max_size=12), st.sampled_from([None, 1, 8]))
def test_it_follows_the_full_cache_through_any_history(model, steps, every):
    """Its copies equal the full cache's after accepted and rejected drafts, plain steps, and restarts."""
    full, middle = SETUP.pair(model, every=every)
    sequence = TokenSequence(ids(90))
    list(full.prefill(sequence))
    for kind, first, second in steps:
        take_step(full, middle, sequence, ("restart" if len(sequence) > 700 else kind, first, second))
        found = middle.rows(sequence)
        assert_equals_the_full_cache(middle.cache, full.cache)
        assert found.isfinite().all()
        assert middle.cache.length == len(sequence) == middle.num_cached
