"""A tree of tokens in flight: several continuations of the committed tokens, computed in the same passes.

Each token sees the committed tokens, its ancestors and itself, and has the RoPE position of its depth (SpecInfer, arXiv
2305.09781, section 4.2). The tokens' slots behind the committed ones are in the order of the tree's parents; `commit`
keeps one path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # shapes of trees are planned and listed without torch, which takes seconds to import
    import torch
    from torch import Tensor

    from ..kernels.window_attention import Branches

ROOT = -1


class TreeTensors(NamedTuple):
    """A tree on a device: `depths` `[tokens]`, which of them see which, `[tokens, tokens]`, and parents in int32."""

    depths: Tensor
    sees: Tensor
    parents: Tensor


class Tree:
    """The shape of a tree of tokens, from its nodes' parents. `tree_of` returns the same object for the same shape.

    Nodes are numbered from 0 and parents come before their children. The parent `ROOT` is the sequence's last token,
    which is no node.

    Attributes:
        parents: of each node.
        children: of the root, then of each node: `children[node + 1]`, in the order in which they were drawn.
        ranks: the place of each node among its siblings, from 0.
        depths: of each node; 0 follows the root.
        depth: the nodes of the longest path from the root; 0 without nodes.
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
            self.depths.append(0 if parent == ROOT else self.depths[parent] + 1)
            self.children[parent + 1].append(node)
        self.depth = max(self.depths, default=-1) + 1
        self._tensors: dict[torch.device, TreeTensors] = {}

    def __len__(self) -> int:
        return len(self.parents)

    def on(self, device: torch.device) -> TreeTensors:
        """Return the tree's tensors on a device, the same ones every time."""
        if device not in self._tensors:
            import torch

            with torch.inference_mode(False):
                parents = torch.tensor(self.parents, dtype=torch.int32)
                tensors = TreeTensors(torch.tensor(self.depths), self._sees(), parents)
                self._tensors[device] = TreeTensors(*(x.to(device) for x in tensors))
        return self._tensors[device]

    def _sees(self) -> Tensor:
        import torch

        sees = torch.eye(len(self), dtype=torch.bool)
        for index, parent in enumerate(self.parents):
            if parent >= 0:
                sees[index] |= sees[parent]
        return sees

    def path_to(self, node: int) -> list[int]:
        """Return the nodes from the root's child down to `node`."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def follow(self, ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Return the longest path from the root along which the tree's tokens `ids` are the first of `tokens`."""
        path: list[int] = []
        above = ROOT
        for token in tokens:
            same = (node for node in range(above + 1, len(self)) if self.parents[node] == above and ids[node] == token)
            if (above := next(same, len(self))) == len(self):
                break
            path.append(above)
        return path

    def is_path(self, keep: Sequence[int]) -> bool:
        """Return whether tokens are a path from the root down."""
        return all(self.parents[token] == above for token, above in zip(keep, (-1, *keep), strict=False))


def tree_of(parents: Sequence[int]) -> Tree:
    """Return the tree with these parents; the last trees are cached, because drafts repeat their shapes."""
    return _cached(tuple(parents))


@lru_cache(maxsize=128)
def _cached(parents: tuple[int, ...]) -> Tree:
    return Tree(parents)


def branches_of(tree: Tree, device: torch.device, held: int) -> Branches:
    """Return what `attend_limited` reads of a tree; the first `held` tokens are those of earlier passes."""
    from ..kernels.window_attention import Branches

    depths, sees, _ = tree.on(device)
    return Branches(depths, sees, [tree.path_to(node) for node in range(held, len(tree))])
