"""The base of the retrieval caches that copy nothing: tables of the full cache's chunks, attended to where they lie."""

from __future__ import annotations

from collections.abc import Sequence

from ..memory.tree_attention import Tree
from .full import FullCache
from .selected import SelectedCache
from .selection import Refresh, Selector


class InPlaceCache(SelectedCache):
    """Refers to the full cache's store for the selected chunks and the tail.

    Tokens that the full cache has not run yet are stored behind its own. It overwrites them when it runs tokens there,
    and `adopt` then drops them.
    """

    def __init__(
        self, full: FullCache, selector: Selector, refresh: Refresh, budget: int, chunk: int, tail: int
    ) -> None:
        super().__init__(full, selector, refresh, budget, chunk, tail)
        self._writes = -1  # the full cache's `writes` when this cache's own tokens were last intact

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
        if end > self._full.capacity:  # no assert: recorded calls of the native kernel check nothing more
            raise AssertionError(f"{end} tokens in a cache of {self._full.capacity}")
        # Invalidate the tokens of another such cache, not these. In this order: after an interrupt between the two, the
        # next pass over the full cache must not have the number that this cache has noted.
        self._full.writes += 1
        self._writes = self._full.writes

    @property
    def ahead(self) -> int:
        """Return how many tokens the full cache has behind the committed ones of this cache."""
        return max(self._full.length - self._length, 0)

    @property
    def stored(self) -> int:
        """Return how many in-flight tokens the full cache has: its exact ones are not overwritten by approximations."""
        return min(max(self.ahead - self._held, 0), self._inflight)

    def _compact(self, keep: Sequence[int]) -> None:
        self._full.store.compact(self._length, keep)

    @property
    def seen(self) -> int:
        """Return how many tokens the first one behind the committed ones attends to, itself included."""
        return self.selection.shape[1] * self._chunk + self._length - self.tail_start + 1
