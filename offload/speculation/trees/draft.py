"""Drafts: proposed tokens, as a chain or a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ...settings.tree_settings import TreeSampling
from .tree import tree_of, within


class Draft(NamedTuple):
    """Proposed tokens, and the distributions that they were drawn from.

    `rows` is `[tokens, vocab]`, or None if every distribution is one-hot, or if sampling is
    coupled, which needs none. `parents` are those of a tree (tree.py); None
    is a chain, each token of which follows the one before. In a tree, the children of node i were drawn from row i + 1
    and those of the root from row 0; rows that no child uses may be anything, or be missing at the end.
    """

    tokens: list[int]
    rows: Tensor | None
    parents: tuple[int, ...] | None = None

    @property
    def depths(self) -> Sequence[int]:
        """Return the place of each token after the sequence, from 0."""
        return range(len(self.tokens)) if self.parents is None else tree_of(self.parents).depths

    @property
    def depth(self) -> int:
        """Return how many tokens may be accepted."""
        return len(self.tokens) if self.parents is None else tree_of(self.parents).depth

    def path(self, node: int) -> Sequence[int]:
        """Return the tokens, by index, from the first one down to a node; none for -1."""
        return range(node + 1) if self.parents is None else tree_of(self.parents).path_to(node)


class DraftedTree(NamedTuple):
    """The shape of the trees that a level drafts, and how the children of their nodes are drawn."""

    parents: tuple[int, ...]
    sampling: TreeSampling = TreeSampling.WITHOUT_REPLACEMENT

    def within(self, depth: int) -> DraftedTree:
        """Return the part of the tree up to a depth."""
        return self._replace(parents=within(self.parents, depth))


NOTHING = Draft([], None)
