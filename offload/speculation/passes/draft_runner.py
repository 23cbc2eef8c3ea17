"""The runner of a draft model, whose cache keeps the first and the latest tokens."""

from collections.abc import Generator

from torch import Tensor

from ...caches.streaming_llm import StreamingCache
from ...events import DraftPrefilled
from ...model.decoder import Model
from ...sequence import TokenSequence
from .runner import Runner

WINDOWS = 4  # that are run: keys of the last one depend, layer by layer, on tokens of the ones before


class DraftRunner(Runner[StreamingCache]):
    """A runner on a StreamingCache.

    Of a sequence that is far ahead of the cache, it runs the sink and the last windows only. The draft model's
    proposals may change with it, and so its acceptance, but no output.
    """

    relative_cost = 0.2  # a guess, until it is measured

    def __init__(self, model: Model, cache: StreamingCache, chunk: int) -> None:
        super().__init__(model, cache, chunk)
        self._sink, self._tail = cache.sink, WINDOWS * cache.window

    @property
    def attended(self) -> int:
        return min(self._sink + self.cache.window, self.cache.length)

    def read(self, sequence: TokenSequence) -> Generator[DraftPrefilled]:
        """Run the tokens that the cache lacks and can keep, a chunk at a time; counts are of the tokens to run."""
        self._skip(sequence)
        first, end = self.num_cached, len(sequence)
        if first < end:
            for event in self.prefill(sequence):
                yield DraftPrefilled(event.done - first, end - first)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits as a runner does, with -inf for the tokens that the target does not have.

        So the drawn tokens, and the distributions that the verification sees, are of the other tokens alone.
        """
        logits, barred = super().logits(hidden), self.model.barred
        return logits if barred is None else logits.index_fill(1, barred, float("-inf"))

    def _synchronise(self, sequence: TokenSequence) -> Tensor | None:
        self._skip(sequence)
        return super()._synchronise(sequence)

    def _skip(self, sequence: TokenSequence) -> None:
        """If the cache is far behind, fill the sink, and drop all tokens before the last windows."""
        first = len(sequence) - self._tail
        if self._matching_prefix(sequence) < len(sequence) or self._last is None:
            self._truncate(min(self.num_cached, len(sequence) - 1))  # the cache may start over
        while self.num_cached < min(self._sink, first):
            self._run(sequence.tokens[self.num_cached : min(self._sink, first, self.num_cached + self.chunk)])
        if self.num_cached < first:
            self._last = None
            self.cache.skip(first)
            self._cached += sequence.tokens[self.num_cached : first]
