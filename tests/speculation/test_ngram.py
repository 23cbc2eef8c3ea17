"""The suffix index against a rescan of the text, and lookup's proposals."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.sequence import TokenSequence
from offload.speculation.drafters.ngram import LookupDrafter, SuffixIndex
from offload.speculation.trees.tree import tree_of

TEXTS = st.lists(st.integers(0, 3), max_size=40)


def rescanned(text, tail):
    """Return the length of the longest suffix of text + tail that occurs in text before, and the positions after it."""
    whole = [*text, *tail]
    for length in range(len(whole), 0, -1):
        suffix = whole[len(whole) - length :]
        positions = [end for end in range(length, len(text) + 1) if text[end - length : end] == suffix]
        positions = [end for end in positions if end < len(whole)]
        if positions:
            return length, positions
    return 0, []


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 3), max_size=6))
def test_the_longest_match_is_that_of_a_rescan(text, tail):
    index = SuffixIndex()
    for token in text:
        index.append(token)
    length, position = index.match(tail)
    expected, positions = rescanned(text, tail)
    assert length == expected
    assert not length or position in positions


@settings(max_examples=100, deadline=None)
@given(TEXTS, TEXTS, TEXTS, st.integers(0, 12))
def test_proposals_do_not_depend_on_earlier_tentative_tokens(text, tentative, tail, limit):
    drafter, sequence = LookupDrafter(), TokenSequence(text)
    before = drafter.propose(sequence, limit)
    sequence.extend(tentative)
    drafter.propose(sequence, limit)
    sequence.truncate(len(text))
    sequence.extend(tail)
    found = drafter.propose(sequence, limit)
    fresh = TokenSequence(text)
    fresh.extend(tail)
    assert found == LookupDrafter().propose(fresh, limit)
    sequence.truncate(len(text))
    assert drafter.propose(sequence, limit) == before


def test_the_following_tokens_are_proposed_and_a_period_is_continued():
    drafter = LookupDrafter()
    assert drafter.propose(TokenSequence([1, 2, 3, 4, 9, 1, 2, 3]), 3).tokens == [4, 9, 1]
    assert drafter.propose(TokenSequence([7, 5, 6, 5, 6, 5]), 7).tokens == [6, 5, 6, 5, 6, 5, 6]
    assert drafter.propose(TokenSequence([1, 2, 3]), 3).tokens == []
    assert drafter.draft_kind(TokenSequence([1, 2, 3])) is None


def test_of_equal_matches_the_latest_one_wins():
    assert LookupDrafter().propose(TokenSequence([1, 2, 8, 1, 2, 9, 1, 2]), 1).tokens == [9]


def test_a_drafter_works_after_an_interrupt_while_its_index_grows(monkeypatch):
    """The interrupt may come within an append, at any token."""
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    append = SuffixIndex.append
    for position in range(len(text)):
        drafter, sequence = LookupDrafter(), TokenSequence(text)

        def interrupted(index, token, position=position):
            append(index, token)
            if index.size == position + 1:
                index.size -= 1  # the append is not complete: states were added, and the size was not
                raise KeyboardInterrupt

        monkeypatch.setattr(SuffixIndex, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drafter.draft_kind(sequence)
        monkeypatch.setattr(SuffixIndex, "append", append)
        assert drafter.propose(sequence, 2) == LookupDrafter().propose(TokenSequence(text), 2)


def test_a_tree_has_all_that_followed_the_longest_suffix_the_latest_first():
    index = built([1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 3, 7, 1, 2])
    tokens, parents = index.continuations([], 8, 3, 2)
    assert (tokens[0], parents[0]) == (3, -1)
    assert {token for token, parent in zip(tokens, parents, strict=True) if parent == -1} == {3, 5}
    assert [token for token, parent in zip(tokens, parents, strict=True) if parent == 0] == [7, 4]
    assert index.continuations([3], 8, 1, 2) == ([7, 4], (-1, -1))
    assert index.continuations([], 1, 3, 2) == ([3], (-1,))
    assert built(range(9)).continuations([], 8, 3, 2) == ([], ())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=4), st.integers(1, 12))
def test_each_token_of_a_tree_followed_a_suffix_in_the_text(text, tail, nodes):
    tokens, parents = built(text).continuations(tail, nodes, 4, 2)
    tree = tree_of(parents)
    assert len(tokens) <= nodes and tree.depth <= 4
    for node, token in enumerate(tokens):
        path = [tokens[index] for index in tree.path_to(node)[:-1]]
        pattern = [*[*text, *tail, *path][-2:], token]
        assert pattern in [text[at : at + 3] for at in range(len(text) - 2)]
    for children in tree.children:
        assert len({tokens[child] for child in children}) == len(children)


def built(text):
    index = SuffixIndex()
    for token in text:
        index.append(token)
    return index
