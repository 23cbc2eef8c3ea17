"""The full cache, which keeps every token."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..architecture.rope import Rope, rows_of
from ..kernels import triton
from ..kernels.native.structs import BLOCK
from ..memory.block_store import BlockStore
from ..memory.plain_store import PlainStore
from ..memory.store import Store, append
from ..memory.tree_attention import Tree
from ..memory.window_rings import Windows
from ..sequence import Watermarks
from ..settings.method_sizes import KEPT_QUERIES
from .in_flight import InFlightTokens, KeptQueries
from .recurrent_states import States
from .static_step import StoreStep


class FullCache(InFlightTokens):
    """Every key and value of one sequence of up to `capacity` tokens, in a store.

    The store has the layers that attend to all tokens, `windows` those that attend to a window, if there are any, and
    `states` those with linear attention.
    All caches of the sequence share `rope`. `marks` records rollbacks, for caches that copy from the store; `writes`
    counts passes, for caches that use the store's memory behind the committed tokens.
    """

    def __init__(
        self,
        store: Store,
        rope: Rope,
        capacity: int,
        windows: Windows | None = None,
        states: States | None = None,
    ) -> None:
        self.store, self.windows, self.states = store, windows, states
        self.device = store.device
        self.capacity = capacity
        self.rope = rope
        self.marks = Watermarks()
        self.writes = 0
        self._held_at = 0  # `writes` at the last pass over a tree
        self._next: tuple[int, int] | None = None  # the current layer, and its next token's position
        self._queries: KeptQueries | None = None

    @property
    def held(self) -> int:
        return self._held if self._held_at == self.writes else 0

    def begin(self, tokens: int, tree: Tree | None = None, chunk: int | None = None) -> None:
        """Begin a pass as in `KVCache`; with `chunk`, each layer attends chunk by chunk, in one call each."""
        end = self.length + (tokens if tree is None else len(tree))
        assert tokens >= 1 and end <= self.capacity, f"{end} tokens in a cache of {self.capacity}"
        self._enter(tokens, tree)
        self.writes += 1
        self._next = None
        if tree is None:
            self._forget_queries()  # until `commit`: those of an interrupted pass are of some layers
        else:
            self._begin_tree(tree)
        self.store.begin(self.length, end - self.length, chunk, self._held)
        if self.windows is not None:
            self.windows.begin(self.length, tokens, tree, self._held)
        if self.states is not None:
            assert tree is None, "linear attention has no trees"
            self.states.begin(self.length, tokens)

    def _begin_tree(self, tree: Tree) -> None:
        self._held_at = self.writes
        if self._queries is not None:
            self._queries.begin_tree(len(tree), self._held)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, lse: Tensor | None = None) -> Tensor:
        if self.tree is not None:
            q = append(self.store, layer, self.start, q, k, v, rows_of(self.store.shape, layer, self.rows))
            if self._queries is not None and k is not None:
                self._queries.keep_of_tree(layer, q, self._held)
            return self.store.attend(layer, q, self.length, self.tree, lse)
        q, start = self.append(layer, q, k, v)
        return self.store.attend(layer, q, start, lse=lse)

    def append(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, int]:
        """Store keys and values as `attend` does; return the rotated queries, and the position of the first one."""
        before, start = self._next, self.length
        if before is not None and before[0] == layer and before[1] < self.length + self._inflight:
            start = before[1]
        self._next = layer, start + q.shape[0]
        rows = self.rows
        if q.shape[0] < self._inflight:
            some = slice(start - self.length, start - self.length + len(q))
            rows = rows[0][some], rows[1][some]
        q = append(self.store, layer, start, q, k, v, rows_of(self.store.shape, layer, rows))
        if self._queries is not None and k is not None:
            self._queries.keep(layer, q)
        return q, start

    def native_sequence(self) -> Any:
        """Return the part of the pass under way that the native kernel runs as a whole; None if it does not."""
        store, has_others = self.store, self.windows is not None or self.states is not None
        if not isinstance(store, BlockStore) or has_others or self._inflight > KEPT_QUERIES:
            return None
        sequence = store.sequence(self._inflight, self.start, self.length + 1, self.rows, self.tree)
        if self._queries is not None and self.tree is None:
            sequence.rotated, sequence.queries = self._queries.rows.data_ptr(), KEPT_QUERIES
            self._queries.count = self._inflight
        elif self._queries is not None:
            every = self._queries.of_tree
            sequence.rotated, sequence.queries = every[0, self._held].data_ptr(), every.shape[1]
        return sequence

    def hold(self) -> None:
        self.store.end()
        super().hold()

    def _commit_pass(self) -> None:
        self.store.end()
        super()._commit_pass()
        if self._queries is not None:
            self._queries.end = self.length

    def _compact(self, keep: Sequence[int]) -> None:
        self.store.compact(self.length, keep)
        if self._queries is not None and keep:
            self._queries.keep_path(keep, self.length)

    @property
    def has_static_steps(self) -> bool:
        """Return whether the store is plain memory, and the kernel reads no more of it than is committed.

        Torch's attention with a mask would read all of the capacity.
        """
        has_layers_alone = self.windows is None and self.states is None and not self.store.shape.caps_scores
        return isinstance(self.store, PlainStore) and has_layers_alone and triton.serves(self.store.layer(0)[0][:1])

    @property
    def position(self) -> int:
        """Return the position of the first in-flight token."""
        return self.length

    def fits(self, rows: int) -> bool:
        return self.length + rows <= self.capacity

    def begin_padded(self, tokens: int, rows: int) -> None:
        assert rows <= KEPT_QUERIES and self.fits(rows), f"{rows} rows behind {self.length} tokens"
        self.begin(tokens)
        self._set_num_queries(tokens)

    def step_key(self) -> bool:
        return self._queries is not None

    def new_step(self, rows: int) -> StoreStep:
        return StoreStep(self, self._plain, rows, None if self._queries is None else self._queries.rows)

    @property
    def _plain(self) -> PlainStore:
        assert isinstance(self.store, PlainStore)
        return self.store

    def free_position(self, rows: int) -> int:
        """Return where in the store `rows` tokens lie that are never kept."""
        return self.length

    def clear(self) -> None:
        self._plain.clear()

    @property
    def is_dumpable(self) -> bool:
        """Return whether `dump` has the windows, too: not where they are in another layout than the store."""
        windows, store = self.windows, self.store
        has_blocks = isinstance(store, BlockStore)
        return windows is None or ((has_blocks or isinstance(store, PlainStore)) and windows.has_blocks is has_blocks)

    def holds(self, start: int) -> bool:
        """Return whether all keys and values of the tokens from position `start` on are there."""
        return self.windows is None or self.windows.holds(start)

    def dump(self, start: int, end: int) -> Tensor:
        """Return a copy of tokens as `Store.dump` does, of the layers with a window behind the others.

        It is flat where those have other heads.
        """
        kv = self.store.dump(start, end)
        if self.windows is None:
            return kv
        window = self.windows.dump(start, end)
        return torch.cat((kv, window) if kv.shape[1:] == window.shape[1:] else (kv.flatten(), window.flatten()))

    def restore(self, tokens: int, kv: Tensor) -> None:
        """Commit tokens without running them, from what `dump` returned."""
        end = self.length + tokens
        assert end <= self.capacity, f"{end} tokens in a cache of {self.capacity}"
        self.writes += 1
        if self.windows is None:
            self.store.load(self.length, kv)
        else:
            kv, window = self._parts(kv, tokens, self.windows)
            self.store.load(self.length, kv)
            self.windows.load(self.length, end, window)
        self.length = end
        self._forget_queries()
        self._leave()

    def restore_states(self, length: int, states: Tensor) -> None:
        """Roll back to `length` tokens, where layers with linear attention go on from what `States.dump` returned.

        Until then the cache is not intact behind tokens that were restored.
        """
        assert self.states is not None
        self.states.load(length, states)
        self.truncate(length)

    def _parts(self, kv: Tensor, tokens: int, windows: Windows) -> tuple[Tensor, Tensor]:
        """Return what `dump` has put together, in the shapes of the store and of the windows."""
        if kv.dim() > 1:
            return kv[: self.store.shape.layers], kv[self.store.shape.layers :]
        parts, shapes = [], (self.store.shape, windows.shape)
        sizes = [2 * shape.layers * shape.kv_heads * shape.head_dim * tokens for shape in shapes]
        for part, shape in zip(kv.split(sizes), shapes, strict=True):
            inner = (tokens // BLOCK, -1) if windows.has_blocks else (tokens, 2, shape.head_dim)
            parts.append(part.view(shape.layers, shape.kv_heads, *inner))
        return parts[0], parts[1]

    def adopt(self, tokens: int) -> None:
        """Commit the first tokens of an empty cache, whose keys and values are in the store already."""
        is_plain = self.windows is None and self.states is None
        assert self.length == 0 and tokens <= self.capacity and (is_plain or not tokens)
        self.writes += 1
        self.length = tokens
        self._forget_queries()

    def truncate(self, length: int) -> int:
        assert 0 <= length <= self.length, f"cannot truncate {self.length} committed tokens to {length}"
        length = self.restartable(length)
        self.length = length = length if self.continues(length) else 0
        self._leave()
        self.store.truncate(length)
        if self.states is not None:
            self.states.truncate(length)
        self.marks.lower(length)
        return length

    def restartable(self, length: int) -> int:
        """Return the most tokens, up to `length`, to which the store can roll back."""
        return self.store.restartable(length)

    def keep_queries(self) -> None:
        """Keep the newest queries of every pass from now on, for `query`."""
        if self._queries is None:
            self._leave()  # the queries of a tree in flight were not kept
            self._queries = KeptQueries(self.store)

    def query(self) -> Tensor | None:
        """Return the rotated queries `[layers, heads, head_dim]` of the newest committed token.

        Returns None if it was not kept: the token was run before `keep_queries`, or the rollback to it was too long.
        """
        return None if self._queries is None else self._queries.of(self.length)

    def _forget_queries(self) -> None:
        if self._queries is not None:
            self._queries.end = -1

    def _set_num_queries(self, tokens: int) -> None:
        """Note how many queries a pass keeps that does not call `append`."""
        if self._queries is not None:
            self._queries.count = tokens
