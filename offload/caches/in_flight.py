"""The base of caches that have tokens in flight: those of a pass that is not committed, and those of a tree.

And the queries of the newest tokens, by which chunks are selected.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..architecture.rope import Rope
from ..kernels.delta_rule import DeltaRule
from ..memory.store import Store
from ..memory.tree_attention import Tree
from ..memory.window_rings import Windows
from ..settings.method_sizes import KEPT_QUERIES
from .recurrent_states import States


class InFlightTokens(ABC):
    """A cache's tokens that are not committed: those of the pass under way, and those of a tree's earlier passes."""

    device: torch.device
    length = 0  # committed tokens
    _inflight = 0  # tokens of the pass under way
    _held = 0  # tokens of earlier passes over the same tree
    tree: Tree | None = None
    windows: Windows | None = None  # of the layers that attend to a window, if there are any
    states: States | None = None  # of the layers with linear attention, if there are any
    rope: Rope
    _rows: tuple[Tensor, Tensor] | None = None

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The rotations of the tokens in flight, made when they are first asked for."""
        if self._rows is None:
            tree = self.tree
            rows = self.rope.rows(self.length, self.length + (self._inflight if tree is None else tree.depth))
            if tree is not None:  # those of each depth
                depths = tree.on(rows[0].device).depths[self._held :]
                rows = rows[0].index_select(0, depths), rows[1].index_select(0, depths)
            self._rows = rows
        return self._rows

    @property
    def is_intact(self) -> bool:
        """Return whether the committed tokens can be continued: not after an interrupted pass over many tokens."""
        return self.continues(self.length)

    def continues(self, length: int) -> bool:
        """Return whether layers with a window or with linear attention can go on behind `length` committed tokens."""
        has_windows = self.windows is None or self.windows.covers(length)
        return has_windows and (self.states is None or self.states.covers(length))

    def attend_window(self, layer: int, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None = None) -> Tensor:
        """Store and attend as `KVCache.attend`, for a layer number `layer` of those that attend to a window."""
        assert self.windows is not None
        return self.windows.attend(layer, q, k, v, lse)

    def attend_linear(self, layer: int, rule: DeltaRule, rows: Tensor, gates: Tensor) -> Tensor:
        """Run the tokens as `Attends.attend_linear`, for a layer number `layer` of those with linear attention."""
        assert self.states is not None
        return self.states.attend(layer, rule, rows, gates)

    def positions(self) -> Tensor:
        """Return the positions of the pass's tokens, as `Attends.positions`."""
        if self.tree is None:
            return torch.arange(self.length, self.length + self._inflight, device=self.device)
        return self.tree.on(self.device).depths[self._held :] + self.length

    @property
    def has_static_steps(self) -> bool:
        return False

    @property
    def held(self) -> int:
        """Return how many tokens of a tree are in flight from passes that have ended; 0 if they are lost."""
        return self._held

    @property
    def start(self) -> int:
        """Return the position behind the committed tokens and those of earlier passes: the slot of the pass's first."""
        return self.length + self._held

    def hold(self) -> None:
        """End a pass over a tree; its tokens stay in flight."""
        self._held += self._inflight
        self._inflight = 0

    def commit(self, keep: Sequence[int] | None = None) -> None:
        if keep is None:
            self._commit_pass()
            return
        is_path = self.tree is not None and len(keep) <= self.held and self.tree.is_path(keep)
        assert is_path, "a path of tokens that are in flight"
        self._compact(keep)
        if self.windows is not None:
            self.windows.compact(self.length, keep)
        self.length += len(keep)
        self._leave()

    def _commit_pass(self) -> None:
        """Commit the tokens of the pass under way."""
        if self.states is not None:
            self.states.commit()
        self.length += self._inflight
        self._inflight = 0

    @abstractmethod
    def _compact(self, keep: Sequence[int]) -> None:
        """Move the tokens of a path in flight together, behind the committed ones."""

    def _enter(self, tokens: int, tree: Tree | None) -> None:
        """Note the tokens of a pass that begins; without a tree, or with another one, earlier passes are forgotten."""
        if tree is None or len(tree) == tokens:
            self._held = 0
        else:
            known = self.tree.parents[: self.held] if self.held and self.tree is not None else ()
            assert tree.parents[:-tokens] == known, "the tokens of a tree before those of the pass are in flight"
        self.tree, self._inflight, self._rows = tree, tokens, None

    def _leave(self) -> None:
        self.tree, self._held, self._inflight = None, 0, 0


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
        self.of_tree = self._new(0)

    def _new(self, tokens: int) -> Tensor:
        shape = self._store.shape
        size = (shape.layers, tokens, shape.heads, shape.head_dim)
        return torch.empty(size, dtype=self._store.dtype, device=self._store.device)

    def keep(self, layer: int, q: Tensor) -> None:
        """Keep the newest of a pass's queries `[tokens, heads, head_dim]` of a layer."""
        self.count = min(len(q), KEPT_QUERIES)
        self.rows[layer, : self.count] = q[-self.count :]

    def begin_tree(self, tokens: int, held: int) -> None:
        """Make room for the queries of a tree; those of its first `held` tokens are there."""
        if self.of_tree.shape[1] < tokens:
            kept, self.of_tree = self.of_tree, self._new(tokens)
            if held:
                self.of_tree[:, :held] = kept[:, :held]

    def keep_of_tree(self, layer: int, q: Tensor, held: int) -> None:
        """Keep the queries `[tokens, heads, head_dim]` of a tree's tokens behind the first `held`."""
        self.of_tree[layer, held : held + len(q)] = q

    def keep_path(self, keep: Sequence[int], length: int) -> None:
        """Keep the newest queries of the tree's tokens `keep`, which follow `length` committed ones."""
        newest = keep[-KEPT_QUERIES:]
        self.end = -1  # until all of them are there
        self.rows[:, : len(newest)] = self.of_tree[:, newest]
        self.count, self.end = len(newest), length + len(keep)

    def of(self, length: int) -> Tensor | None:
        """Return those `[layers, heads, head_dim]` of the last of `length` tokens; None if they were not kept."""
        behind = self.end - length
        return self.rows[:, self.count - 1 - behind] if 0 <= behind < self.count else None
