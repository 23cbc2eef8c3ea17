"""The best tree for any acceptance vector, by Sequoia's dynamic program (arXiv 2402.12374, section 3.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from .tree import ROOT


def dynamic_program(rates: Sequence[np.ndarray], nodes: int) -> tuple[int, ...]:
    """Return the parents of the best tree of up to `nodes` nodes, breadth first, in O(depths * children * nodes^2).

    Args:
        rates: for each depth, the acceptance of the k-th child; they need not fall with k: a child that is seldom
            accepted may be worth its node for those behind it.
    """
    below = np.zeros(nodes + 1)  # tokens that the best children of a node yield, by the nodes they have
    sizes: list[list[np.ndarray]] = []  # by depth, child, nodes left: of the child's subtree
    for level in reversed(rates):
        later, taken = np.zeros(nodes + 1), []
        for rate in level[::-1]:
            subtree: np.ndarray = np.append(0.0, rate * (1 + below[:-1]))  # by its size
            size = np.array([_best_size(subtree, later, left) for left in range(nodes + 1)])
            later = subtree[size] + np.where(size > 0, later[np.arange(nodes + 1) - size], 0.0)
            taken.append(size)
        below = later
        sizes.append(taken[::-1])
    return _parents(sizes[::-1], nodes)


def _best_size(subtree: np.ndarray, later: np.ndarray, left: int) -> int:
    """Return the size of a child's subtree that, with the later children in the rest of `left` nodes, yields most."""
    yields = subtree[: left + 1] + later[left::-1]
    yields[0] = 0.0  # without this child there are no later ones
    return int(yields.argmax())


def _parents(sizes: Sequence[Sequence[np.ndarray]], nodes: int) -> tuple[int, ...]:
    parents: list[int] = []
    todo = deque([(ROOT, 0, nodes)])  # a node, the depth of its children, and the nodes that these may have
    while todo:
        node, depth, left = todo.popleft()
        for size in sizes[depth] if depth < len(sizes) else ():
            if not size[left]:
                break
            parents.append(node)
            todo.append((len(parents) - 1, depth + 1, int(size[left]) - 1))
            left -= int(size[left])
    return tuple(parents)
