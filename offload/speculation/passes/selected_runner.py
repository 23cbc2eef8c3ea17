"""A runner on a selection of another runner's cache: the middle level of speculation."""

from ...caches.selected import SelectedCache
from ...sequence import TokenSequence
from .estimators import ATTENTION_COST
from .runner import Runner


class SelectedRunner(Runner):
    """A runner on a selection of the full cache of another runner with the same model.

    It does not run tokens that are in the full cache, which must match the sequence's committed tokens.
    """

    cache: SelectedCache

    def __init__(self, full: Runner, cache: SelectedCache) -> None:
        super().__init__(full.model, cache)
        self._full = full
        shape, itemsize = full.model.shape, full.model.dtype.itemsize
        costs = full.model.read_cost, ATTENTION_COST * shape.growing.kv_bytes(1, itemsize)
        # Shares of ranks may be uneven, but all ranks have to choose alike: they use rank 0's.
        self._weights, self._kv_of_token = full.model.group.agree(costs)

    def observe(self, drafted: int, accepted: int) -> None:
        self.cache.refresh.observe(drafted, accepted)

    @property
    def relative_cost(self) -> float:
        """The bytes that a step reads, relative to a plain step of the full cache; those over a link count more."""
        kv = self._kv_of_token * self._full.num_cached
        kept = min(self.cache.budget / max(self._full.num_cached, 1), 1.0)
        cost = (self._weights + kept * self.cache.read_share * kv) / sum(self._read())
        return min(cost, 0.95)

    @property
    def attended(self) -> int:
        return min(self.cache.budget, self.cache.length)

    def _read(self) -> tuple[float, float]:
        """Return the costs of the weights and the KV that a plain step of the full cache reads."""
        kv = self._kv_of_token * self._full.num_cached
        return self._weights, self._full.cache.store.read_cost * kv

    @property
    def setups(self) -> int:
        return 0 if self.cache.selects_for_free else self.cache.selections

    def setup_cost(self, sequence: TokenSequence) -> float:
        if not (cost := self.cache.selection_cost(len(sequence))):
            return 0.0
        weights, kv = self._read()
        return cost * kv / (weights + kv)

    def renew(self) -> None:
        """Select again before the next pass, because the prompt has changed."""
        self.cache.renew()

    def _matching_prefix(self, sequence: TokenSequence) -> int:
        agreed = super()._matching_prefix(sequence)
        self.cache.adopt()
        if agreed > self.cache.length:
            agreed = self.cache.length
            del self._cached[agreed:]
            self._last = None
        if agreed < self._full.num_cached:
            agreed = min(self._full.num_cached, len(sequence))
            self._cached += sequence.tokens[self.num_cached : agreed]
            self._last = None
        return agreed
