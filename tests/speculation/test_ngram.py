"""The suffix index against a rescan of the text, and lookup's proposals."""

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.planning.memory import LOOKUP_BYTES
from offload.sequence import TokenSequence
from offload.speculation.ngram import LookupDrafter, SuffixIndex

TEXTS = st.lists(st.integers(0, 3), max_size=40)


def rescanned(text, tail):
    """The longest suffix of text + tail that ends inside text, before the end: its length and the places behind it."""
    whole = [*text, *tail]
    for length in range(len(whole), 0, -1):
        suffix = whole[len(whole) - length :]
        places = [end for end in range(length, len(text) + 1) if text[end - length : end] == suffix]
        places = [end for end in places if end < len(whole)]
        if places:
            return length, places
    return 0, []


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 3), max_size=6))
def test_the_longest_match_is_that_of_a_rescan(text, tail):
    index = SuffixIndex()
    for token in text:
        index.append(token)
    length, place = index.match(tail)
    expected, places = rescanned(text, tail)
    assert length == expected
    assert not length or place in places


@settings(max_examples=100, deadline=None)
@given(TEXTS, TEXTS, TEXTS, st.integers(0, 12))
def test_proposals_do_not_depend_on_what_was_tried_out_before(text, tried, tail, limit):
    drafter, sequence = LookupDrafter(), TokenSequence(text)
    before = drafter.propose(sequence, limit)
    sequence.extend(tried)
    drafter.propose(sequence, limit)
    sequence.truncate(len(text))
    sequence.extend(tail)
    found = drafter.propose(sequence, limit)
    fresh = TokenSequence(text)
    fresh.extend(tail)
    assert found == LookupDrafter().propose(fresh, limit)
    sequence.truncate(len(text))
    assert drafter.propose(sequence, limit) == before


def test_what_followed_is_proposed_and_a_circle_goes_on():
    drafter = LookupDrafter()
    assert drafter.propose(TokenSequence([1, 2, 3, 4, 9, 1, 2, 3]), 3).tokens == [4, 9, 1]
    assert drafter.propose(TokenSequence([7, 5, 6, 5, 6, 5]), 7).tokens == [6, 5, 6, 5, 6, 5, 6]
    assert drafter.propose(TokenSequence([1, 2, 3]), 3).tokens == []
    assert drafter.outlook(TokenSequence([1, 2, 3])) is None


def test_a_longer_match_wins_over_a_later_one():
    assert LookupDrafter().propose(TokenSequence([1, 2, 3, 8, 2, 3, 9, 1, 2, 3]), 1).tokens == [8]


def test_of_equal_matches_the_latest_that_was_matched_wins():
    assert LookupDrafter().propose(TokenSequence([1, 2, 8, 1, 2, 9, 1, 2]), 1).tokens == [9]


def test_another_text_is_indexed_anew():
    drafter, sequence = LookupDrafter(), TokenSequence([1, 2, 3, 1, 2])
    assert drafter.propose(sequence, 1).tokens == [3]
    sequence.restart([1, 2, 4, 1, 2])
    assert drafter.propose(sequence, 1).tokens == [4]


def test_an_interrupt_while_the_index_grows_leaves_a_drafter_that_works(monkeypatch):
    """At any token: Ctrl-C does not ask whether an append is complete."""
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    append = SuffixIndex.append
    for place in range(len(text)):
        drafter, sequence = LookupDrafter(), TokenSequence(text)

        def interrupted(index, token, place=place):
            if index.size == place:
                index._length.append(7)  # half of a state
                raise KeyboardInterrupt
            append(index, token)

        monkeypatch.setattr(SuffixIndex, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drafter.outlook(sequence)
        monkeypatch.setattr(SuffixIndex, "append", append)
        assert drafter.propose(sequence, 2) == LookupDrafter().propose(TokenSequence(text), 2)


@pytest.mark.parametrize("vocab", [2, 50, 5000])
def test_the_index_grows_in_proportion_to_the_text(vocab):
    """At most two states a token and three transitions, as the paper proves: no rescan, no quadratic growth."""
    rng = random.Random(0)
    index, size = SuffixIndex(), 5000
    for _ in range(size):
        index.append(rng.randrange(vocab))
    assert len(index._length) <= 2 * size
    assert sum(map(len, index._next)) <= 3 * size


@pytest.mark.parametrize("vocab", [100, 50_000])
def test_the_memory_estimate_counts_the_index(vocab):
    rng = random.Random(0)
    tracemalloc.start()
    try:
        index = SuffixIndex()
        for _ in range(10_000):
            index.append(rng.randrange(1000, 1000 + vocab))
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.8 * LOOKUP_BYTES < size / index.size < 1.1 * LOOKUP_BYTES
