"""Which trees a level drafts: a fixed shape, or the best one of a size for the acceptance so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..tree_config import DEEPEST, TreeSampling, TreeShape
from .draft import DraftedTree
from .tree import k_ary, tree_of
from .tree_estimators import ChildAcceptance
from .tree_shape import best_tree

_PRIOR = 0.6  # acceptance of a first child


class DraftTrees(Protocol):
    """Chooses the shape of each draft."""

    deepest: int

    def shape(self, depth: int) -> DraftedTree:
        """Return the shape of the next draft, at most `depth` deep."""
        ...

    def observe(self, parents: Sequence[int], path: Sequence[int]) -> None:
        """Note which path of a tree was accepted."""
        ...


class FixedTrees:
    """Trees of one shape, cut off at the depth that is allowed."""

    def __init__(self, tree: DraftedTree) -> None:
        self._tree = tree
        self.deepest = tree_of(tree.parents).depth

    def shape(self, depth: int) -> DraftedTree:
        return self._tree if depth >= self.deepest else self._tree.within(depth)

    def observe(self, parents: Sequence[int], path: Sequence[int]) -> None:
        pass


class BestTrees:
    """The best trees of a number of nodes (tree_shape.py) for the measured acceptance of each child."""

    deepest = DEEPEST

    def __init__(self, nodes: int, sampling: TreeSampling) -> None:
        self._nodes, self._sampling = nodes, sampling
        self._acceptance = ChildAcceptance(_PRIOR)
        self._cycle = 0

    def shape(self, depth: int) -> DraftedTree:
        parents = best_tree(self._acceptance.rates(self._cycle), self._nodes, min(depth, self.deepest))
        return DraftedTree(parents or (-1,), self._sampling)

    def observe(self, parents: Sequence[int], path: Sequence[int]) -> None:
        self._cycle += 1
        self._acceptance.observe(self._cycle, tree_of(parents).visits(path))


def draft_trees(shape: TreeShape, sampling: TreeSampling) -> DraftTrees | None:
    """Return what chooses the trees of a shape; None for chains, which are also drafted where no size is given."""
    if shape.kind == "k-ary":
        return FixedTrees(DraftedTree(k_ary(shape.widths), sampling))
    return BestTrees(shape.nodes, sampling) if shape.kind == "best" else None
