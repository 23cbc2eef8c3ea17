"""The newest queries of a sequence, by which chunks are selected."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..memory.store import Store
from ..settings.method_sizes import KEPT_QUERIES


class KeptQueries:
    """The rotated queries of the newest tokens in all layers, of each pass and of a tree in flight.

    Attributes:
        rows: `[layers, KEPT_QUERIES, heads, head_dim]`, the first `count` of them in use.
        count: how many the last pass has kept.
        end: the position behind the token of the last one; -1 if none are valid.
        of_tree: `[layers, tokens, heads, head_dim]`, of all tokens of a tree in flight.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.rows = self._new(KEPT_QUERIES)
        self.count, self.end = 0, -1
        self.of_tree: Tensor | None = None

    def _new(self, tokens: int) -> Tensor:
        shape = self._store.shape
        size = (shape.layers, tokens, shape.heads, shape.head_dim)
        return torch.empty(size, dtype=self._store.dtype, device=self._store.device)

    def keep(self, layer: int, q: Tensor) -> None:
        """Keep the newest of a pass's queries `[tokens, heads, head_dim]` of a layer."""
        self.count = min(len(q), KEPT_QUERIES)
        self._store.copy_rows(q[-self.count :], self.rows[layer, : self.count])

    def begin_tree(self, tokens: int, held: int) -> None:
        """Make room for the queries of a tree; those of its first `held` tokens are there."""
        if self.of_tree is None or self.of_tree.shape[1] < tokens:
            kept, self.of_tree = self.of_tree, self._new(tokens)
            if held:
                self.of_tree[:, :held] = kept[:, :held]

    def keep_of_tree(self, layer: int, q: Tensor, held: int) -> None:
        """Keep the queries `[tokens, heads, head_dim]` of a tree's tokens behind the first `held`."""
        self._store.copy_rows(q, self.of_tree[layer, held : held + len(q)])

    def keep_path(self, keep: Sequence[int], length: int) -> None:
        """Keep the newest queries of the tree's tokens `keep`, which follow `length` committed ones."""
        newest = keep[-KEPT_QUERIES:]
        self.end = -1  # until all of them are there
        self.rows[:, : len(newest)] = self.of_tree[:, newest]
        self.count, self.end = len(newest), length + len(keep)

    def newest(self, length: int, most: int) -> list[Tensor]:
        """Return those `[layers, heads, head_dim]` of up to `most` of the newest of `length` tokens, newest first."""
        behind = self.end - length
        if not 0 <= behind < self.count:
            return []
        newest = self.count - 1 - behind
        return [self.rows[:, index] for index in range(newest, max(newest - most, -1), -1)]
