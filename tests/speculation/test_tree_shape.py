"""The best tree, against exhaustive search and against Sequoia's dynamic program."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.speculation.trees.shape import best_tree, expected_tokens
from offload.speculation.trees.tree import Tree, chain, k_ary


@cache
def all_trees(nodes):
    """Return every tree of so many nodes, as parents in breadth-first order: these do not decrease."""
    if nodes == 0:
        return [()]
    return [(*tree, parent) for tree in all_trees(nodes - 1) for parent in range(max(tree, default=-1), nodes - 1)]


ACCEPTANCE = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5).map(
    lambda rates: tuple(sorted((rate / max(1.0, sum(rates)) for rate in rates), reverse=True))
)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(ACCEPTANCE, st.integers(1, 7), st.integers(1, 6))
def test_no_other_tree_yields_more(acceptance, nodes, depth):
    found = expected_tokens(best_tree(acceptance, nodes, depth), acceptance)
    allowed = (tree for tree in all_trees(nodes) if Tree(tree).depth <= depth)
    assert found == pytest.approx(max(expected_tokens(tree, acceptance) for tree in allowed))


@pytest.mark.parametrize(
    ("acceptance", "nodes", "depth", "parents"),
    [
        ((0.8,), 5, 3, (-1, 0, 1)),  # a single child: a chain, as deep as allowed
        ((1.0, 0.0), 4, 9, chain(4)),
        ((0.5, 0.4), 2, 1, (-1, -1)),
        ((0.5, 0.25), 4, 9, (-1, -1, 0, 0)),  # .5 .25 .25 .125
        ((0.0,), 4, 4, ()),
        ((), 4, 4, ()),
    ],
)
def test_small_trees(acceptance, nodes, depth, parents):
    assert best_tree(acceptance, nodes, depth) == parents


def test_expected_tokens_of_chains_and_k_ary_trees():
    assert expected_tokens(chain(3), (0.5, 0.2)) == 1 + 0.5 + 0.25 + 0.125
    assert expected_tokens(k_ary((2, 1)), (0.5, 0.2)) == pytest.approx(1 + 0.7 + 0.7 * 0.5)
    assert expected_tokens((-1, -1, -1), (0.5, 0.2)) == pytest.approx(1.7)  # a third child has never been accepted
