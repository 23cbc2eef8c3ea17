"""The shape of a token tree: who is whose child. A tree is written as the list of its nodes' parents.

Nodes are numbered from 0 and parents come before their children, siblings in the order in which they were drawn. The
parent `ROOT` is the sequence's last token, which is no node: a chain of n tokens is `range(-1, n - 1)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

ROOT = -1


class Verdict(NamedTuple):
    """What a verification accepted: the nodes from the root down, and the token that follows them."""

    path: list[int]
    token: int


class Visit(NamedTuple):
    """A node whose children were tried: how many it has, and which of them was accepted, counted from 0; or None."""

    children: int
    accepted: int | None


class Tree:
    """A tree and what follows from its parents.

    Attributes:
        parents: of each node.
        children: of the root, then of each node: `children[node + 1]`.
        ranks: the place of each node among its siblings, from 0.
        depths: of each node; the root's children have depth 1.
    """

    def __init__(self, parents: Sequence[int]) -> None:
        """Raise ValueError unless every parent comes before its children."""
        self.parents = tuple(parents)
        self.children: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        self.ranks: list[int] = []
        self.depths: list[int] = []
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} of a tree has the parent {parent}, which does not come before it")
            self.ranks.append(len(self.children[parent + 1]))
            self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
            self.children[parent + 1].append(node)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        """The length of the longest path from the root; 0 without nodes."""
        return max(self.depths, default=0)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root's child down to `node`."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def visits(self, path: Sequence[int]) -> list[Visit]:
        """Return what a verification that accepted `path` tells of each node whose children it tried."""
        reached = zip((ROOT, *path), (*path, None), strict=True)
        return [
            Visit(len(self.children[node + 1]), None if child is None else self.ranks[child])
            for node, child in reached
            if self.children[node + 1]
        ]


def tree_of(parents: Sequence[int]) -> Tree:
    """Return the tree with these parents; the last trees are cached, because drafts repeat their shapes."""
    return _cached(tuple(parents))


@lru_cache(maxsize=64)
def _cached(parents: tuple[int, ...]) -> Tree:
    return Tree(parents)


def within(parents: Sequence[int], depth: int) -> tuple[int, ...]:
    """Return the parents of the tree's nodes up to a depth."""
    tree = tree_of(parents)
    kept = [node for node in range(len(tree)) if tree.depths[node] <= depth]
    number = {ROOT: ROOT, **{node: index for index, node in enumerate(kept)}}
    return tuple(number[tree.parents[node]] for node in kept)


def paths(before: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """Return `before`, then for each node `before` and the tokens from the root down to the node."""
    found = [list(before)]
    for token, parent in zip(tokens, parents, strict=True):
        found.append([*found[parent + 1], token])
    return found


def chain(tokens: int) -> tuple[int, ...]:
    """Return the parents of a chain."""
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
