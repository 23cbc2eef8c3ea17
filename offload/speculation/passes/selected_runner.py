"""A runner on a selection of another runner's cache: the middle level of speculation."""

from ...caches.full import FullCache
from ...caches.selected import SelectedCache
from ...sequence import TokenSequence
from .estimators import ATTENTION_COST
from .runner import Runner


class SelectedRunner(Runner[SelectedCache]):
    """A runner on a selection of the full cache of the target's runner.

    It does not run tokens that are in the full cache, which must match the sequence's committed tokens.
    """

    def __init__(self, target_runner: Runner[FullCache], cache: SelectedCache) -> None:
        super().__init__(target_runner.model, cache)
        self._target_runner = target_runner
        shape, itemsize = self.model.shape, self.model.dtype.itemsize
        costs = self.model.read_cost, ATTENTION_COST * shape.full_attention.kv_bytes(1, itemsize)
        # Shares of ranks may be uneven, but all ranks have to choose alike: they use rank 0's.
        self._weights, self._kv_of_token = self.model.group.agree(costs)

    def observe(self, drafted: int, accepted: int) -> None:
        self.cache.refresh.observe(drafted, accepted)

    @property
    def attended(self) -> int:
        return min(self.cache.budget, self.cache.length)

    @property
    def relative_cost(self) -> float:
        """The bytes that a step reads, relative to a plain step of the full cache; those over a link count more."""
        tokens = self._target_runner.num_cached
        kept = min(self.cache.budget / max(tokens, 1), 1.0) * self.cache.read_share
        return min((self._weights + kept * self._kv_of_token * tokens) / (self._weights + self._full_kv()), 0.95)

    def _full_kv(self) -> float:
        """Return the cost of the KV that a plain step of the full cache reads, in bytes of weights."""
        target = self._target_runner
        return target.cache.store.read_cost * self._kv_of_token * target.num_cached

    @property
    def setups(self) -> int:
        return 0 if self.cache.selects_for_free else self.cache.selections

    def setup_cost(self, sequence: TokenSequence) -> float:
        if not (cost := self.cache.selection_cost(len(sequence))):
            return 0.0
        kv = self._full_kv()
        return cost * kv / (self._weights + kv)

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
        target = self._target_runner
        if agreed < target.num_cached:
            agreed = min(target.num_cached, len(sequence))
            self._cached += sequence.tokens[self.num_cached : agreed]
            self._last = None
        return agreed
