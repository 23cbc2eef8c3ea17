"""The bases of the retrieval caches: a few percent of the full cache's KV. Subclasses copy it or refer to it."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..architecture.rope import rows_of
from ..memory.tree_attention import Tree
from ..memory.window_rings import Windows
from .full import FullCache
from .in_flight import InFlightTokens
from .recurrent_states import States
from .selection import Refresh, Selector, choose


class SelectedCache(InFlightTokens):
    """A KVCache of selected chunks of a full cache, followed by the newest tokens without a gap (the tail).

    It computes keys and values only of tokens that the full cache has not run yet; `adopt` replaces them by the full
    cache's. The chunks are selected again when the selection is out of date (`Refresh`) or the tail is nearly full.

    `refresh` is told how many of the tokens drafted with this cache the full cache accepted.
    `selection` `[layers * kv_heads, slots]` has the chunk numbers attended to, and `tail_start` is the position in the
    sequence where the chunks end and the tail begins.
    """

    def __init__(
        self,
        full: FullCache,
        selector: Selector,
        refresh: Refresh,
        budget: int,
        chunk: int,
        tail: int,
    ) -> None:
        """Select up to `budget` tokens in chunks of `chunk`; the tail has `tail` tokens, twice the longest draft."""
        self._full, self._selector, self.refresh, self.rope = full, selector, refresh, full.rope
        self.device = full.device
        self.chunk, self._slots = chunk, min(budget, full.capacity) // chunk
        self._tail, self._room = tail, tail + chunk
        self.tail_start = 0
        self._rebuild = True
        self.selections = 0  # so far
        self.windows = None if full.windows is None else full.windows.like()
        self._windows_end = 0  # up to there, they are copies of the full cache's
        self.states = None if full.states is None else full.states.like()
        self._states_end = -1  # the full cache's length when they were copied from its; -1: to be copied
        shape = full.store.shape
        self.selection = torch.empty((shape.layers * shape.kv_heads, 0), dtype=torch.long, device=full.store.device)
        self._allocate()
        full.keep_queries()

    @abstractmethod
    def _allocate(self) -> None:
        """Allocate what a subclass has, of the sizes given."""

    @property
    def budget(self) -> int:
        """The number of tokens in selected chunks."""
        return self._slots * self.chunk

    @property
    def read_share(self) -> float:
        """The time to attend to a token of the selected chunks, relative to the full cache's."""
        return 1.0

    @property
    def selects_for_free(self) -> bool:
        """Whether a selection takes no time worth counting: nothing is scored, and nothing copied."""
        return False

    def selection_cost(self, length: int) -> float:
        """Estimate the time of the selection before the next pass, relative to a plain step's attention.

        0 if none is due when the sequence has `length` tokens. The first one reads all keys, the later ones do not.
        """
        if not self._rebuild and not self._is_due(length):
            return 0.0
        return self._selector.cost + self._full.store.mean_keys_cost * self._selector.missing(length // self.chunk)

    def renew(self) -> None:
        """Select again at the next pass."""
        self._rebuild = True

    def adopt(self) -> None:
        """Adopt the full cache's tokens, which must all be in the sequence; keep those that only this cache has run.

        Those are dropped if they have been overwritten, or if the chunks have to be selected again.
        """
        full = self._full.length
        unchanged = self._full.marks.unchanged(self)
        self._selector.truncate(unchanged)
        if unchanged < self.tail_start:
            self._rebuild = True
        self._windows_end = min(self._windows_end, unchanged)
        intact = self._invalidate(unchanged)
        if self.states is not None and (self._states_end != full or unchanged < full):
            self._states_end, intact = -1, False  # tokens behind other states are of no use
        self.length = max(self.length, full) if intact and not self._rebuild else full
        self._full.marks.update(self, full)

    @abstractmethod
    def _invalidate(self, unchanged: int) -> bool:
        """Invalidate whatever comes from tokens of the full cache at position `unchanged` or later.

        Returns whether the keys and values that only this cache has are intact.
        """

    def begin(self, tokens: int, tree: Tree | None = None) -> None:
        end = self.length + (tokens if tree is None else len(tree))
        is_first = tree is None or len(tree) == tokens
        if is_first and self.length <= self._full.length and (self._rebuild or self._is_due(end)):
            self._select()
        assert not self._rebuild and end - self.tail_start <= self._room, "a draft longer than the tail"
        self._enter(tokens, tree)
        if self.windows is not None and self._full.windows is not None:
            self._begin_windows(self.windows, self._full.windows, tokens, tree)
        if self.states is not None and self._full.states is not None:
            self._begin_states(self.states, self._full.states, tokens)

    def _begin_windows(self, windows: Windows, full: Windows, tokens: int, tree: Tree | None) -> None:
        """Copy what the full cache has run since the last pass, and begin a pass."""
        if not windows.covers(self.length):
            windows.clear()
            self._windows_end = 0
        end = min(self._full.length, self.length)
        windows.copy(full, self._windows_end, end)
        self._windows_end = end
        windows.begin(self.length, tokens, tree, self._held)

    def _begin_states(self, states: States, full: States, tokens: int) -> None:
        """Copy the full cache's states if it has run tokens since, and begin a pass."""
        if self._states_end < 0 or not states.covers(self.length):
            states.copy(full, self.length)
            self._states_end = self._full.length
        states.begin(self.length, tokens)

    @property
    def is_intact(self) -> bool:
        """Return whether the committed tokens can be continued; states may be copied from the full cache."""
        has_windows = self.windows is None or self.windows.covers(self.length)
        has_states = self.states is None or self.length <= self._full.length or self.states.covers(self.length)
        return has_windows and has_states

    def rows_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's rotations of the in-flight tokens."""
        return rows_of(self._full.store.shape, layer, self.rows)

    def _is_due(self, end: int) -> bool:
        nearly_full = end - self.tail_start > self.chunk + self._tail // 2
        return nearly_full or self.refresh.due(self.length)

    def _select(self) -> None:
        self._rebuild = True  # until done: an interrupt must not leave the old selection with the new length
        chunks = max(self.length - 1, 0) // self.chunk  # the newest token stays in the tail
        self._use(choose(self._selector, self._full, chunks, min(self._slots, chunks)), chunks)
        self.tail_start = chunks * self.chunk
        self._rebuild = False
        self.selections += 1
        self.refresh.start(self.length)

    @abstractmethod
    def _use(self, chosen: Tensor, chunks: int) -> None:
        """Attend from now on to the chunks `chosen` `[layers * kv_heads, slots]`, out of the first `chunks`."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, lse: Tensor | None = None) -> Tensor:
        """Store and attend as in `KVCache`."""

    def truncate(self, length: int) -> int:
        assert 0 <= length <= self.length, f"cannot truncate {self.length} committed tokens to {length}"
        self._leave()
        if self.states is not None:
            length = self._truncate_states(self.states, length)
        self.length = length
        if length < self.tail_start:
            self._rebuild = True
        return length

    def _truncate_states(self, states: States, length: int) -> int:
        """Roll the states back; return the length, that of the full cache where it alone has states."""
        if self._states_end >= 0 and states.covers(length):
            states.truncate(length)
            return length
        self._states_end = -1
        return min(length, self._full.length)


class InPlaceCache(SelectedCache):
    """Refers to the full cache's store for the selected chunks and the tail.

    Tokens that the full cache has not run yet are stored behind its own. It overwrites them when it runs tokens there,
    and `adopt` then drops them.
    """

    _writes = -1  # the full cache's `writes` when this cache's own tokens were last intact

    def _invalidate(self, unchanged: int) -> bool:
        return self._writes == self._full.writes

    def adopt(self) -> None:
        super().adopt()
        self._writes = self._full.writes  # last: an interrupt must not leave overwritten tokens that count as intact

    @property
    def selects_for_free(self) -> bool:
        return self._selector.cost == 0

    @property
    def held(self) -> int:
        return self._held if self._writes == self._full.writes else 0

    def begin(self, tokens: int, tree: Tree | None = None) -> None:
        super().begin(tokens, tree)
        end = self.start + tokens
        assert end <= self._full.capacity, f"{end} tokens in a cache of {self._full.capacity}"
        # Invalidate the tokens of another such cache, not these. In this order: after an interrupt between the two, the
        # next pass over the full cache must not have the number that this cache has noted.
        self._full.writes += 1
        self._writes = self._full.writes

    @property
    def ahead(self) -> int:
        """Return how many tokens the full cache has behind the committed ones of this cache."""
        return max(self._full.length - self.length, 0)

    @property
    def stored(self) -> int:
        """Return how many in-flight tokens the full cache has: its exact ones are not overwritten by approximations."""
        return min(max(self.ahead - self._held, 0), self._inflight)

    def _compact(self, keep: Sequence[int]) -> None:
        self._full.store.compact(self.length, keep)

    @property
    def seen(self) -> int:
        """Return how many tokens the first one behind the committed ones attends to, itself included."""
        return self.selection.shape[1] * self.chunk + self.length - self.tail_start + 1
