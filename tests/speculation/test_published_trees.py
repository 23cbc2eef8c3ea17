"""Sequoia's tables from the acceptance of a first child alone (Chen et al., arXiv 2402.12374v3, tables 1 and 2).

The paper publishes no acceptance with its tables, but how many tokens SpecInfer's trees yield with the same models and
texts: independent sequences, whose tokens depend on the first child's acceptance almost alone. It is taken from these,
and the tokens of Sequoia's trees follow.
"""

import pytest

from offload.speculation.tree import k_ary
from offload.speculation.tree_estimators import ChildAcceptance
from offload.speculation.tree_shape import best_tree, expected_tokens

# Nodes (the root is one of the paper's), depth, tokens per verification, and those of SpecInfer's tree.
ON_DEVICE = [  # table 1: Llama-2-7B with JackFram/llama-68m on an A100; SpecInfer's 5 x 8
    (128, 10, 5.08, 3.96),  # C4, T = 0
    (128, 7, 3.92, 2.97),  # T = 0.6
    (128, 7, 3.86, 3.15),  # OpenWebText, T = 0
    (128, 6, 3.33, 2.54),
    (128, 7, 4.05, 3.27),  # CNN Daily Mail, T = 0
    (128, 6, 3.45, 2.58),
    (128, 10, 4.98, 4.01),  # MT-Bench, T = 0
    (128, 7, 3.96, 2.97),
]
OFFLOADED = [  # table 2: L40, MT-Bench; SpecInfer's 16 x 48
    (768, 18, 10.30, 7.63),  # Llama-2-70B-chat with Llama-2-7B-chat, T = 0
    (768, 18, 9.91, 7.03),
    (768, 18, 11.68, 9.07),  # Llama-3-70B-Instruct with Llama-3-8B-Instruct, T = 0
    (768, 18, 11.37, 8.29),
]
ROWS = [*((*row, (5,) + (1,) * 7) for row in ON_DEVICE), *((*row, (16,) + (1,) * 47) for row in OFFLOADED)]


def rates_that_yield(tokens, parents):
    """Return the prior acceptances with which a tree yields so many tokens."""
    low, high = 0.2, 0.99
    for _ in range(20):
        middle = (low + high) / 2
        rates = ChildAcceptance(middle).rates(0)
        low, high = (middle, high) if expected_tokens(parents, rates) < tokens else (low, middle)
    return rates


@pytest.mark.parametrize(("nodes", "depth", "published", "specinfer", "widths"), ROWS)
def test_the_tokens_of_sequoias_trees_follow_from_those_of_independent_sequences(
    nodes, depth, published, specinfer, widths
):
    rates = rates_that_yield(specinfer, k_ary(widths))
    tokens = expected_tokens(best_tree(rates, nodes - 1, depth), rates)
    assert tokens == pytest.approx(published, rel=0.12)
