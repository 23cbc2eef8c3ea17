"""The hardware-aware size of a tree, against trying all sizes; and the online estimate of children's acceptance."""

import random

import pytest

from offload.settings.tree_settings import TreeShape
from offload.speculation.trees.acceptance import Acceptance
from offload.speculation.trees.best_size import fastest_tree, sized_tree
from offload.speculation.trees.shape import best_tree, expected_tokens
from offload.speculation.trees.tree import Tree, Visit, chain

RATES = (0.6, 0.12, 0.06, 0.04, 0.03)


def seconds(parents, draft_s, verify_s):
    """Return the seconds of drafting a tree depth by depth and of verifying it."""
    tree = Tree(parents)
    inner = [1, *(0 for _ in range(tree.depth))]  # nodes with children, by depth
    for node, depth in enumerate(tree.depths):
        inner[depth + 1] += bool(tree.children[node + 1])
    return verify_s(len(parents) + 1) + sum(draft_s(rows) for rows in inner[: tree.depth])


HARDWARE = {
    "rows cost nothing": (lambda rows: 0.05, lambda rows: 1.0),
    "streamed weights": (lambda rows: 0.02 + 0.0001 * rows, lambda rows: 1.0 + 0.002 * rows),
    "a CPU": (lambda rows: 0.1 + 0.05 * rows, lambda rows: 1.0 + 0.15 * (rows - 1)),
    "drafts cost much": (lambda rows: 0.9, lambda rows: 1.0 + 0.01 * rows),
    "rows come in tiles": (lambda rows: 0.1, lambda rows: 1.0 + 0.3 * (-(-rows // 16) - 1)),
}


@pytest.mark.parametrize("hardware", HARDWARE)
def test_no_other_size_and_depth_is_faster(hardware):
    draft_s, verify_s = HARDWARE[hardware]
    found = fastest_tree(RATES, draft_s, verify_s, 40, 8, sizes=range(1, 41))
    assert found.seconds == pytest.approx(seconds(found.parents, draft_s, verify_s))
    assert found.tokens == pytest.approx(expected_tokens(found.parents, RATES))
    trees = [(), *(best_tree(RATES, nodes, depth) for nodes in range(1, 41) for depth in range(1, 9))]
    fastest = min(seconds(tree, draft_s, verify_s) / expected_tokens(tree, RATES) for tree in trees)
    assert found.token_s == pytest.approx(fastest)


def test_plain_decoding_is_chosen_where_drafts_lose():
    assert fastest_tree((0.05,), lambda rows: 0.5, lambda rows: 1.0, 64, 8).parents == ()
    assert fastest_tree((), lambda rows: 0.0, lambda rows: 1.0, 64, 8) == ((), 1.0, 1.0)


def observed(acceptance, cycles, widths, belief):
    """Let a belief see verifications of nodes whose children are accepted at these rates."""
    random_ = random.Random(0)
    for cycle in range(cycles):
        width, number = random_.choice(widths), random_.random()
        chances = [sum(acceptance[: rank + 1]) for rank in range(width)]
        accepted = next((rank for rank, chance in enumerate(chances) if number < chance), None)
        belief.count(cycle, [Visit(width, accepted)])
    return belief.rates(cycles)


def test_the_estimate_approaches_the_rates_from_nodes_with_few_and_many_children():
    belief = Acceptance(0.3, keep=1.0)
    found = observed(RATES, 600, (1, 2, 5), belief)
    assert found[0] == pytest.approx(RATES[0], abs=0.12) and found[1] == pytest.approx(RATES[1], abs=0.08)


def test_the_prior_falls_with_the_rank_and_observations_of_one_move_the_later_ones():
    belief = Acceptance(0.6)
    before = belief.rates(0)
    assert before[0] == 0.6 and before[1] == 0.12 and list(before) == sorted(before, reverse=True)
    belief.count(1, [Visit(1, None)] * 20)
    after = belief.rates(1)
    assert after[0] < 0.1 and after[1] < before[1]


@pytest.mark.parametrize("shape", ["k-ary:2x3x1", "k-ary:4", "16", "auto", "chain"])
def test_a_named_shape_has_its_own_tokens_and_seconds(shape):
    draft_s, verify_s = HARDWARE["streamed weights"]
    found = sized_tree(TreeShape.parse(shape), RATES, draft_s, verify_s)
    assert found.seconds == pytest.approx(seconds(found.parents, draft_s, verify_s))
    assert found.tokens == pytest.approx(expected_tokens(found.parents, RATES))
    nodes = {"k-ary:2x3x1": 14, "k-ary:4": 4, "16": 16}.get(shape, len(found.parents))
    assert len(found.parents) == nodes > 0
    if shape == "chain":
        assert found.parents == chain(nodes)


def test_a_requested_size_is_drafted_even_where_plain_decoding_is_faster():
    found = sized_tree(TreeShape.parse("8"), (0.05, *[0.01] * 8), lambda rows: 1.0, lambda rows: 1.0)
    assert len(found.parents) == 8 and found.token_s > 1
