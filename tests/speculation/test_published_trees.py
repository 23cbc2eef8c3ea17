"""Sequoia's tables follow from the acceptance of a first child alone, and its trees grow as it says."""

import itertools

import pytest

from offload.speculation.trees.drafted_trees import ChildAcceptance
from offload.speculation.trees.shape import best_tree, expected_tokens
from offload.speculation.trees.tree import k_ary
from tests.support.published_trees import LARGER_ON_DEVICE, OFFLOADED, ON_DEVICE, first_acceptance

# Sequoia, appendix E: Llama-3-70B-Instruct with Llama-3-8B-Instruct on CNN Daily Mail.
RECORDED = (0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026, 0.0025, 0.0021, 0.0016)
RECORDED += (0.0014, 0.0010, 0.0010, 0.0010, 0.0007, 0.0007, 0.0006)


@pytest.mark.parametrize("row", ON_DEVICE + LARGER_ON_DEVICE + OFFLOADED)
def test_the_tokens_of_sequoias_trees_follow_from_those_of_independent_sequences(row):
    rates = ChildAcceptance(first_acceptance(row)).rates(0)
    tokens = expected_tokens(best_tree(rates, row.nodes - 1, row.depth - 1), rates)
    assert tokens == pytest.approx(row.tokens, rel=0.12)


def test_trees_grow_where_independent_sequences_saturate():
    """Figure 4: at 512 nodes a third more tokens than 16 sequences; every doubling of a tree adds about as much."""
    trees = [expected_tokens(best_tree(RECORDED, 2**power, 64), RECORDED) for power in range(4, 11)]
    sequences = [expected_tokens(k_ary((16,) + (1,) * (2**power // 16 - 1)), RECORDED) for power in range(8, 11)]
    gains = [later - earlier for earlier, later in itertools.pairwise(trees)]
    assert min(gains) > 0.4 and sequences[-1] - sequences[0] < 0.2
    assert trees[5] > 1.33 * sequences[1]
