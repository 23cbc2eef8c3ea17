"""The contract of `Drafter` (offload/speculation/drafters/drafter.py): lookup, a draft model, and levels."""

import pytest
import torch

from offload.sequence import TokenSequence
from offload.speculation.trees.tree import DraftedTree, tree_of
from tests.support.drafters import DRAFTERS, VOCAB, new_subject

# The suffix occurs several times before, so that lookup proposes a draft.
TEXT = [3, 9, 4, 1, 7, 7, 2, 11, 5, 8] * 5 + [3, 9, 4, 1]
TREE = DraftedTree((-1, -1, 0, 0, 1, 2))


@pytest.fixture
def sequence():
    return TokenSequence(TEXT)


@pytest.fixture(params=DRAFTERS)
def kind(request):
    return request.param


@pytest.fixture
def subject(kind, sequence):
    return new_subject(kind, sequence)


@pytest.fixture
def drafter(subject):
    return subject.drafter


def proposed_by_a_fresh_drafter(kind, ids, limit):
    sequence = TokenSequence(ids)
    return new_subject(kind, sequence).drafter.propose(sequence, limit).tokens


def state(sequence):
    return list(sequence.tokens), sequence.committed, sequence.tentative


@pytest.mark.parametrize("limit", [1, 2, 5, 8])
def test_a_draft_is_within_the_limit_with_the_distributions_its_tokens_were_drawn_from(drafter, sequence, limit):
    """A deterministic drafter has no distributions. The sequence does not change."""
    before = state(sequence)
    tokens, rows, _ = drafter.propose(sequence, limit)
    assert state(sequence) == before
    assert 1 <= len(tokens) <= limit
    assert all(isinstance(token, int) and 0 <= token < VOCAB for token in tokens)
    if rows is not None:
        assert rows.shape == (len(tokens), VOCAB)
        torch.testing.assert_close(rows.sum(1), torch.ones(len(tokens)))
        assert (rows >= 0).all() and all(row[token] > 0 for token, row in zip(tokens, rows, strict=True))


def test_proposing_behind_tentative_tokens_leaves_them_tentative(drafter, sequence):
    sequence.extend([7, 7])
    before = state(sequence)
    drafter.propose(sequence, 4)
    assert state(sequence) == before == ([*TEXT, 7, 7], len(TEXT), [7, 7])


def test_each_token_follows_those_before_it(drafter, sequence):
    """Greedily, a short draft is a prefix of a long one, and the rest is the draft behind that prefix."""
    whole = drafter.propose(sequence, 6).tokens
    assert drafter.propose(sequence, 2).tokens == whole[:2]
    sequence.extend(whole[:3])
    assert drafter.propose(sequence, 3).tokens[: len(whole) - 3] == whole[3:6]


def test_rejected_tokens_do_not_change_the_next_draft(drafter, sequence):
    first = drafter.propose(sequence, 5)
    sequence.extend([2, 2, 6])
    drafter.propose(sequence, 5)
    sequence.truncate(len(TEXT))
    assert drafter.propose(sequence, 5).tokens == first.tokens


@pytest.mark.parametrize("accepted", [0, 2, 4])
def test_the_next_draft_fits_the_sequence_however_many_tokens_were_accepted(kind, subject, sequence, accepted):
    draft = subject.drafter.propose(sequence, 4).tokens
    subject.drafter.observe(len(draft), accepted)
    assert state(sequence) == (TEXT, len(TEXT), [])
    sequence.extend([*draft[:accepted], 1])
    sequence.commit()
    subject.settle(sequence)
    assert subject.drafter.propose(sequence, 3).tokens == proposed_by_a_fresh_drafter(kind, sequence.tokens, 3)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_tree_is_no_deeper_than_the_limit_and_no_larger_than_its_shape(drafter, sequence, limit):
    before = state(sequence)
    draft = drafter.propose(sequence, limit, TREE)
    assert 1 <= draft.depth <= limit
    assert state(sequence) == before
    if draft.parents is not None:
        assert len(draft.tokens) == len(draft.parents) <= len(TREE.parents)
        for children in tree_of(draft.parents).children:
            assert len({draft.tokens[child] for child in children}) == len(children)


@pytest.mark.parametrize("node", [-1, 0, 3])
def test_the_next_draft_fits_the_sequence_whichever_path_was_accepted(kind, subject, sequence, node):
    draft = subject.drafter.propose(sequence, 3, TREE)
    path = draft.path(min(node, len(draft.tokens) - 1))
    sequence.extend([*(draft.tokens[index] for index in path), 1])
    sequence.commit()
    subject.settle(sequence)
    assert subject.drafter.propose(sequence, 3).tokens == proposed_by_a_fresh_drafter(kind, sequence.tokens, 3)


def test_the_first_path_of_a_greedy_tree_is_a_models_chain(sequence):
    drafter = new_subject("draft model", sequence).drafter
    draft = drafter.propose(sequence, 3, TREE)
    assert [draft.tokens[node] for node in (0, 2, 5)] == drafter.propose(sequence, 3).tokens
