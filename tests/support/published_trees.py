"""Sequoia's tables (Chen et al., arXiv 2402.12374v3, tables 1 to 3), and the acceptance behind them.

The paper publishes no acceptance with its tables, but how many tokens SpecInfer's trees yield with the same models and
texts: independent sequences, whose tokens depend on the first child's acceptance almost alone.
"""

from typing import NamedTuple

from offload.speculation.trees.drafted_trees import ChildAcceptance
from offload.speculation.trees.shape import expected_tokens
from offload.speculation.trees.tree import k_ary


class Row(NamedTuple):
    """A row: the tree's nodes and depth, both of which count the root too (section F.1.1), and its tokens."""

    nodes: int
    depth: int
    tokens: float  # per verification
    specinfer: float
    widths: tuple[int, ...]  # of SpecInfer's tree
    seconds: float = 0.0  # per token
    model: str = ""


_5X8, _16X48 = (5,) + (1,) * 7, (16,) + (1,) * 47
ON_DEVICE = [  # table 1: Llama-2-7B with JackFram/llama-68m on an A100
    Row(128, 10, 5.08, 3.96, _5X8),  # C4, T = 0
    Row(128, 7, 3.92, 2.97, _5X8),  # T = 0.6
    Row(128, 7, 3.86, 3.15, _5X8),  # OpenWebText, T = 0
    Row(128, 6, 3.33, 2.54, _5X8),
    Row(128, 7, 4.05, 3.27, _5X8),  # CNN Daily Mail, T = 0
    Row(128, 6, 3.45, 2.58, _5X8),
    Row(128, 10, 4.98, 4.01, _5X8),  # MT-Bench, T = 0
    Row(128, 7, 3.96, 2.97, _5X8),
]
LARGER_ON_DEVICE = [  # tables 1 and 3: on C4, OpenWebText and CNN Daily Mail, each at T = 0 and 0.6
    *(Row(64, 9, 4.20, 3.64, _5X8, 0, "Llama-2-13B"), Row(64, 7, 3.57, 2.87, _5X8, 0, "Llama-2-13B")),
    *(Row(64, 7, 3.49, 3.05, _5X8, 0, "Llama-2-13B"), Row(64, 6, 3.06, 2.49, _5X8, 0, "Llama-2-13B")),
    *(Row(64, 7, 3.68, 3.22, _5X8, 0, "Llama-2-13B"), Row(64, 6, 3.17, 2.54, _5X8, 0, "Llama-2-13B")),
    *(Row(64, 6, 4.28, 3.86, _5X8, 0, "Vicuna-33B"), Row(64, 6, 4.16, 3.53, _5X8, 0, "Vicuna-33B")),
    *(Row(64, 5, 3.93, 3.70, _5X8, 0, "Vicuna-33B"), Row(64, 5, 3.82, 3.36, _5X8, 0, "Vicuna-33B")),
    *(Row(64, 5, 3.93, 3.71, _5X8, 0, "Vicuna-33B"), Row(64, 5, 3.86, 3.40, _5X8, 0, "Vicuna-33B")),
]
OFFLOADED = [  # table 2: L40, weights streamed over PCIe 4, MT-Bench
    Row(768, 18, 10.30, 7.63, _16X48, 0.66, "Llama-2-70B"),  # with Llama-2-7B-chat, T = 0
    Row(768, 18, 9.91, 7.03, _16X48, 0.68, "Llama-2-70B"),
    Row(768, 18, 11.68, 9.07, _16X48, 0.60, "Llama-3-70B"),  # with Llama-3-8B-Instruct, T = 0
    Row(768, 18, 11.37, 8.29, _16X48, 0.61, "Llama-3-70B"),
]


def first_acceptance(row: Row) -> float:
    """Return the acceptance of a first child with which SpecInfer's tree yields its published tokens."""
    low, high, parents = 0.2, 0.99, k_ary(row.widths)
    for _ in range(20):
        middle = (low + high) / 2
        is_low = expected_tokens(parents, ChildAcceptance(middle).rates(0)) < row.specinfer
        low, high = (middle, high) if is_low else (low, middle)
    return middle
