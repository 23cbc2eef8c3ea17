"""The best tree, against exhaustive search and against Sequoia's dynamic program."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.speculation.trees.shape import best_tree, candidates, expected_tokens
from offload.speculation.trees.tree import Tree, chain, k_ary

PUBLISHED_LIKE = (0.55, 0.14, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01)


@cache
def all_trees(nodes):
    """Return every tree of so many nodes, as parents in breadth-first order: these do not decrease."""
    if nodes == 0:
        return [()]
    return [(*tree, parent) for tree in all_trees(nodes - 1) for parent in range(max(tree, default=-1), nodes - 1)]


def program(acceptance, nodes, depth):
    """Return the most expected tokens, by Sequoia's dynamic program."""

    @cache
    def children(rank, nodes, depth):
        if not nodes or not depth or rank == len(acceptance):
            return 0.0
        return max(
            0.0,
            *(
                acceptance[rank] * (1 + children(0, size - 1, depth - 1)) + children(rank + 1, nodes - size, depth)
                for size in range(1, nodes + 1)
            ),
        )

    return 1 + children(0, nodes, depth)


ACCEPTANCE = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5).map(
    lambda rates: tuple(sorted((rate / max(1.0, sum(rates)) for rate in rates), reverse=True))
)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(ACCEPTANCE, st.integers(1, 7), st.integers(1, 6))
def test_no_other_tree_yields_more(acceptance, nodes, depth):
    found = expected_tokens(best_tree(acceptance, nodes, depth), acceptance)
    allowed = (tree for tree in all_trees(nodes) if Tree(tree).depth <= depth)
    assert found == pytest.approx(max(expected_tokens(tree, acceptance) for tree in allowed))


def test_no_other_tree_of_ten_nodes_yields_more():
    assert len(all_trees(10)) == 16_796  # Catalan's number
    found = expected_tokens(best_tree(PUBLISHED_LIKE, 10, 10), PUBLISHED_LIKE)
    assert found == pytest.approx(max(expected_tokens(tree, PUBLISHED_LIKE) for tree in all_trees(10)))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(ACCEPTANCE, st.integers(1, 24), st.integers(1, 8))
def test_the_dynamic_program_finds_as_many_tokens(acceptance, nodes, depth):
    parents = best_tree(acceptance, nodes, depth)
    assert expected_tokens(parents, acceptance) == pytest.approx(program(acceptance, nodes, depth))
    assert len(parents) <= nodes and Tree(parents).depth <= depth


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(ACCEPTANCE, min_size=1, max_size=3), st.integers(1, 7), st.integers(1, 4))
def test_no_other_tree_yields_more_where_acceptance_depends_on_the_depth(acceptance, nodes, depth):
    acceptance = tuple(acceptance)
    found = expected_tokens(best_tree(acceptance, nodes, depth), acceptance)
    allowed = (tree for size in range(nodes + 1) for tree in all_trees(size) if Tree(tree).depth <= depth)
    assert found == pytest.approx(max(expected_tokens(tree, acceptance) for tree in allowed))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.permutations(PUBLISHED_LIKE), st.integers(1, 24), st.integers(1, 8))
def test_where_acceptance_rises_from_child_to_child_sequoias_program_may_find_more(acceptance, nodes, depth):
    """Which no drafter's does: its children are in the order of their probabilities. Ours is then a tree of fewer."""
    tree = best_tree(tuple(acceptance), nodes, depth)
    found, most = expected_tokens(tree, tuple(acceptance)), program(tuple(acceptance), nodes, depth)
    assert len(tree) <= nodes and Tree(tree).depth <= depth
    assert 0.7 * most < found <= most + 1e-9


@settings(max_examples=30, deadline=None, derandomize=True)
@given(ACCEPTANCE, st.integers(1, 200), st.integers(1, 32))
def test_the_best_tree_is_never_below_the_best_chain(acceptance, nodes, depth):
    best = expected_tokens(best_tree(acceptance, nodes, depth), acceptance)
    assert best >= expected_tokens(chain(min(nodes, depth)), acceptance) - 1e-9


def test_a_prefix_of_the_ranking_is_the_best_smaller_tree():
    found = candidates(PUBLISHED_LIKE, 20, 12)
    for depth in (1, 3, 12):
        reached = found.reached[found.best(20, depth)].cumsum()
        for nodes in range(1, len(reached) + 1):
            assert 1 + reached[nodes - 1] == pytest.approx(program(PUBLISHED_LIKE, nodes, depth))


@pytest.mark.parametrize(
    ("acceptance", "nodes", "depth", "parents"),
    [
        ((0.8,), 5, 3, (-1, 0, 1)),  # a single child: a chain, as deep as allowed
        ((1.0, 0.0), 4, 9, chain(4)),
        ((0.5, 0.4), 2, 1, (-1, -1)),
        ((0.5, 0.25), 4, 9, (-1, -1, 0, 0)),  # .5 .25 .25 .125
        ((0.0,), 4, 4, ()),
        ((), 4, 4, ()),
        (((0.9,), (0.1, 0.1)), 3, 3, (-1, 0, 0)),
    ],
)
def test_small_trees(acceptance, nodes, depth, parents):
    assert best_tree(acceptance, nodes, depth) == parents


def test_expected_tokens_of_chains_and_k_ary_trees():
    assert expected_tokens(chain(3), (0.5, 0.2)) == 1 + 0.5 + 0.25 + 0.125
    assert expected_tokens(k_ary((2, 1)), (0.5, 0.2)) == pytest.approx(1 + 0.7 + 0.7 * 0.5)
    assert expected_tokens((-1, -1, -1), (0.5, 0.2)) == pytest.approx(1.7)  # a third child has never been accepted
