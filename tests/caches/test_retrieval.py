"""The copied retrieval cache: what it attends to, what it copies, and that it follows the full cache."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.caches.retrieval import CopiedCache
from offload.caches.selection import Refresh
from offload.sequence import TokenSequence
from tests.support.caches import PROMPT, new_subject
from tests.support.retrieval import CYCLE, PLAIN, RESTART, RetrievalSetup, ids, load, take_step
from tests.support.stores import close

CHUNK, BUDGET = 4, 24
SETUP = RetrievalSetup(CopiedCache, CHUNK, BUDGET, capacity=800)


@pytest.fixture(scope="module", params=[2, 4], ids=["GQA", "MHA"])
def model(request, tmp_path_factory):
    return load(tmp_path_factory.mktemp("model"), request.param)


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
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
