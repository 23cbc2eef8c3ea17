"""Drafts and their shapes: trees of tokens. A chain of n tokens is the tree `range(-1, n - 1)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...memory.tree_attention import ROOT, Tree, tree_of
from ...settings.tree_settings import TreeSampling

if TYPE_CHECKING:
    from torch import Tensor


class Verdict(NamedTuple):
    """The result of a verification: the accepted nodes from the root down, and the token that follows them."""

    path: list[int]
    token: int


class Visit(NamedTuple):
    """A node whose children were tried: how many it has, and which of them was accepted, counted from 0; or None."""

    children: int
    accepted: int | None


def visits(tree: Tree, path: Sequence[int]) -> list[Visit]:
    """Return the visits of a verification that accepted `path`: one for each node whose children it tried."""
    reached = zip((ROOT, *path), (*path, None), strict=True)
    return [
        Visit(len(tree.children[node + 1]), None if child is None else tree.ranks[child])
        for node, child in reached
        if tree.children[node + 1]
    ]


def within(parents: Sequence[int], depth: int) -> tuple[int, ...]:
    """Return the parents of the tree's nodes up to a depth."""
    tree = tree_of(parents)
    kept = [node for node in range(len(tree)) if tree.depths[node] < depth]
    number = {ROOT: ROOT, **{node: index for index, node in enumerate(kept)}}
    return tuple(number[tree.parents[node]] for node in kept)


def paths(before: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """Return `before`, then for each node `before` and the tokens from the root down to the node."""
    result = [list(before)]
    for token, parent in zip(tokens, parents, strict=True):
        result.append([*result[parent + 1], token])
    return result


def chain(tokens: int) -> tuple[int, ...]:
    """Return the parents of a chain of tokens."""
    return tuple(range(ROOT, tokens - 1))


def k_ary(widths: Sequence[int]) -> tuple[int, ...]:
    """Return the parents of a tree in which all nodes at depth d have `widths[d]` children, in breadth-first order."""
    parents: list[int] = []
    level = [ROOT]
    for width in widths:
        start = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(start, len(parents)))
    return tuple(parents)


class Draft(NamedTuple):
    """Proposed tokens, and the distributions that they were drawn from.

    Token 0 of a chain was drawn from row 0, and so on. In a tree, the children of node i were drawn from row i + 1, and
    those of the root from row 0; rows that no child uses may be anything, or be missing at the end.

    Attributes:
        rows: `[tokens, vocab]`; None if every distribution is one-hot, or if sampling is coupled, which needs none.
        parents: those of a tree; None for a chain, each token of which follows the one before.
    """

    tokens: list[int]
    rows: Tensor | None
    parents: tuple[int, ...] | None = None

    @property
    def depths(self) -> Sequence[int]:
        """The number of drafted tokens before each token, on its path."""
        return range(len(self.tokens)) if self.parents is None else tree_of(self.parents).depths

    @property
    def depth(self) -> int:
        """The most tokens that may be accepted."""
        return len(self.tokens) if self.parents is None else tree_of(self.parents).depth

    def only(self, nodes: Sequence[int]) -> Draft:
        """Return the draft of some nodes, whose parents are among them, without distributions."""
        number = {ROOT: ROOT, **{node: index for index, node in enumerate(nodes)}}
        parents = self.parents and tuple(number[self.parents[node]] for node in nodes)
        return Draft([self.tokens[node] for node in nodes], None, parents or None)

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
