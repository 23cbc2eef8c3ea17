"""The shape of a tree, from its parents."""

import pytest

from offload.speculation.trees.tree import ROOT, Tree, chain, k_ary, tree_of, visits

# 0 and 1 follow the sequence; 2, 3 and 4 follow 0; 5 follows 3.
PARENTS = (ROOT, ROOT, 0, 0, 0, 3)


def test_children_ranks_and_depths_follow_from_the_parents():
    tree = Tree(PARENTS)
    assert tree.children == [[0, 1], [2, 3, 4], [], [], [5], [], []]
    assert tree.ranks == [0, 1, 0, 1, 2, 0] and tree.depths == [0, 0, 1, 1, 1, 2] and tree.depth == 3
    assert tree.path_to(5) == [0, 3, 5] and tree.path_to(ROOT) == []


@pytest.mark.parametrize(
    ("path", "found"),
    [([], [(2, None)]), ([1], [(2, 1)]), ([0], [(2, 0), (3, None)]), ([0, 3, 5], [(2, 0), (3, 1), (1, 0)])],
)
def test_visits_name_the_children_tried_and_the_accepted_one(path, found):
    assert visits(Tree(PARENTS), path) == found


def test_an_empty_tree_has_a_root_without_children():
    tree = Tree(())
    assert tree.depth == 0 and len(tree) == 0 and visits(tree, []) == []


@pytest.mark.parametrize("parents", [(0,), (ROOT, 2, 0), (-2,)])
def test_a_parent_that_does_not_come_first_is_an_error(parents):
    with pytest.raises(ValueError, match="does not come before"):
        Tree(parents)


def test_chains_and_k_ary_trees():
    assert chain(3) == (ROOT, 0, 1) and chain(0) == ()
    assert k_ary((2, 3, 1)) == (ROOT, ROOT, 0, 0, 0, 1, 1, 1, 2, 3, 4, 5, 6, 7)
    assert k_ary((1, 1, 1)) == chain(3)


def test_trees_are_cached_by_their_parents():
    assert tree_of([ROOT, 0]) is tree_of(range(ROOT, 1))
