"""A tree of tokens in flight: several continuations of the committed tokens, computed in the same passes.

Each token sees the committed tokens, its ancestors and itself, and has the RoPE position of its depth (SpecInfer, arXiv
2305.09781, section 4.2). The tokens' slots behind the committed ones are in the order of the tree's parents; `commit`
keeps one path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..kernels.window_attention import Branches

if TYPE_CHECKING:
    from ..kernels.delta_rule import DeltaRule
    from .states import States
    from .windows import Windows


class TreeTensors(NamedTuple):
    """A tree on a device: `depths` `[tokens]`, which of them see which, `[tokens, tokens]`, and parents in int32."""

    depths: Tensor
    sees: Tensor
    parents: Tensor


class Tree:
    """The shape of a tree of tokens. Do not construct one; `tree_of` returns the same object for the same shape."""

    def __init__(self, parents: tuple[int, ...]) -> None:
        self.parents = parents
        self.depths: list[int] = []  # 0: follows the last committed token
        for index, parent in enumerate(parents):
            assert -1 <= parent < index, "a parent comes before its children"
            self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
        self.deepest = max(self.depths)
        self._tensors: dict[torch.device, TreeTensors] = {}

    def __len__(self) -> int:
        return len(self.parents)

    def on(self, device: torch.device) -> TreeTensors:
        """Return the tree's tensors on a device, the same ones every time."""
        if device not in self._tensors:
            with torch.inference_mode(False):
                parents = torch.tensor(self.parents, dtype=torch.int32)
                found = TreeTensors(torch.tensor(self.depths), self._sees(), parents)
                self._tensors[device] = TreeTensors(*(x.to(device) for x in found))
        return self._tensors[device]

    def _sees(self) -> Tensor:
        sees = torch.eye(len(self), dtype=torch.bool)
        for index, parent in enumerate(self.parents):
            if parent >= 0:
                sees[index] |= sees[parent]
        return sees

    def path_to(self, token: int) -> list[int]:
        """Return a token and its ancestors, from the root down."""
        path = []
        while token >= 0:
            path.append(token)
            token = self.parents[token]
        return path[::-1]

    def follow(self, ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Return the longest path from the root along which the tree's tokens `ids` are the first of `tokens`."""
        path: list[int] = []
        above = -1
        for token in tokens:
            same = (node for node in range(above + 1, len(self)) if self.parents[node] == above and ids[node] == token)
            if (above := next(same, len(self))) == len(self):
                break
            path.append(above)
        return path

    def is_path(self, keep: Sequence[int]) -> bool:
        """Return whether tokens are a path from the root down."""
        return all(self.parents[token] == above for token, above in zip(keep, (-1, *keep), strict=False))


@lru_cache(maxsize=64)
def tree_of(parents: tuple[int, ...]) -> Tree:
    """Return the tree of tokens whose parents have these indices, -1 for the last committed token."""
    return Tree(parents)


def branches_of(tree: Tree, device: torch.device, held: int) -> Branches:
    """Return what `attend_limited` reads of a tree; the first `held` tokens are those of earlier passes."""
    depths, sees, _ = tree.on(device)
    return Branches(depths, sees, [tree.path_to(node) for node in range(held, len(tree))])


class InFlight:
    """A cache's tokens that are not committed: those of the pass under way, and those of a tree's earlier passes."""

    _length = 0  # committed tokens
    _inflight = 0  # tokens of the pass under way
    _held = 0  # tokens of earlier passes over the same tree
    tree: Tree | None = None
    windows: Windows | None = None  # of the layers that attend to a window, if there are any
    states: States | None = None  # of the layers with linear attention, if there are any

    @property
    def is_intact(self) -> bool:
        """Return whether the committed tokens can be continued: not after an interrupted pass over many tokens."""
        return self.continues(self._length)

    def continues(self, length: int) -> bool:
        """Return whether layers with a window or with linear attention can go on behind `length` committed tokens."""
        has_windows = self.windows is None or self.windows.covers(length)
        return has_windows and (self.states is None or self.states.covers(length))

    def attend_window(self, layer: int, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None = None) -> Tensor:
        """Store and attend as `KVCache.attend`, for a layer number `layer` of those that attend to a window."""
        return self.windows.attend(layer, q, k, v, lse)

    def attend_linear(self, layer: int, rule: DeltaRule, rows: Tensor, gates: Tensor) -> Tensor:
        """Run the tokens as `Attends.attend_linear`, for a layer number `layer` of those with linear attention."""
        return self.states.attend(layer, rule, rows, gates)

    def positions(self) -> Tensor:
        """Return the positions of the pass's tokens, as `Attends.positions`."""
        if self.tree is None:
            return torch.arange(self._length, self._length + self._inflight, device=self.device)
        return self.tree.on(self.device).depths[self._held :] + self._length

    @property
    def held(self) -> int:
        """Return how many tokens of a tree are in flight from passes that have ended; 0 if they are lost."""
        return self._held

    @property
    def start(self) -> int:
        """Return the position behind the committed tokens and those of earlier passes: the slot of the pass's first."""
        return self._length + self._held

    def hold(self) -> None:
        """End a pass over a tree; its tokens stay in flight."""
        self._held += self._inflight
        self._inflight = 0

    def _enter(self, tokens: int, tree: Tree | None) -> None:
        """Note the tokens of a pass that begins; without a tree, or with another one, earlier passes are forgotten."""
        if tree is None or len(tree) == tokens:
            self._held = 0
        else:
            known = self.tree.parents[: self.held] if self.held else ()
            assert tree.parents[:-tokens] == known, "the tokens of a tree before those of the pass are in flight"
        self.tree, self._inflight = tree, tokens

    def _leave(self) -> None:
        """Forget the tokens in flight."""
        self.tree, self._held, self._inflight = None, 0, 0

    def _rotations(self, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the rotations of the tree's tokens of this pass; `rows` are those of each depth."""
        depths = self.tree.on(rows[0].device).depths[self._held :]
        cos, sin = (x.index_select(0, depths) for x in rows)
        return cos, sin
