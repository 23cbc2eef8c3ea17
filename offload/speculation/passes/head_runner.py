"""The runner of a trained head, which reads the hidden rows that passes of the target have left."""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from ...caches.streaming_llm import StreamingCache
from ...events import DraftPrefilled
from ...memory.host_memory import upload
from ...memory.tree_attention import Tree, tree_of
from ...model.heads import Head
from ...sequence import TokenSequence, Watermarks
from ...settings.config import Speculation
from ...settings.method_sizes import draft_chunk
from .runner import Runner

_SPARE = 16  # slots


def head_window(head: Head, settings: Speculation) -> int:
    """Return how many slots a head attends to before those that it runs."""
    return min(filter(None, (head.own.window, settings.window)))


def rows_needed(head: Head, settings: Speculation) -> int:
    """Return of how many tokens before a prompt's end a head reads rows: with some more, rollbacks leave a window."""
    return head_window(head, settings) + _SPARE


class HeadRunner:
    """A head with a cache of its latest slots, as ModelDrafter uses a runner.

    Slot t has the token at position t + 1, and a feature of the target's row at position t. Its keys and values stay if
    the row is the full cache's; slots from rows of the head itself, or of a middle level, are run again as soon as the
    full cache has its own. A slot attends to a window of slots before it, at positions inside of the window.
    """

    setups = 0

    def __init__(self, head: Head, settings: Speculation, sources: Sequence[Runner]) -> None:
        """`sources` are the runners of the target, that of the full cache first; all of them keep their rows."""
        window, self._most = head_window(head, settings), draft_chunk(settings)
        shape, rope = head.shape, head.rope(window + self._most)
        self.model, self.sources = head, sources
        self.cache = StreamingCache(shape, rope, 0, window, self._most, head.dtype, head.device)
        self.reach = rows_needed(head, settings)
        self._true = 0  # slots in the cache, from the first on, whose features come from the full cache's rows
        self._first = 0  # the first slot that is in the cache
        self._last: Tensor | None = None  # [1, hidden], of the last slot before drafted ones
        self._rows = torch.empty(0)  # of the last slot: [1, hidden]; of a tree those of its root and nodes
        self._tree: Tree | None = None
        self._marks: Watermarks | None = None
        # Shares of ranks may be uneven, but all ranks have to choose alike, and to grow the same trees.
        own, plain = head.group.agree((head.read_cost, head.target.read_cost))
        self.relative_cost = min(own / plain, 1.0)

    def setup_cost(self, sequence: TokenSequence) -> float:
        """Return 0: a draft has no one-off cost."""
        return 0.0

    def use(self, sources: Sequence[Runner]) -> None:
        """Read the rows of these runners from now on, that of the full cache first."""
        self.sources = sources

    def has_rows(self, sequence: TokenSequence) -> bool:
        """Return whether the target has left the row that the next slot of the sequence needs."""
        return any(len(sequence) - 2 in source.rows_kept(sequence) for source in self.sources)

    def read(self, sequence: TokenSequence) -> Generator[DraftPrefilled]:
        """Run the slots of the last tokens of a prompt."""
        if self.has_rows(sequence):
            count = min(len(sequence) - 1, self.reach)
            yield DraftPrefilled(0, count)
            self.rows(sequence)
            yield DraftPrefilled(count, count)

    @torch.inference_mode()
    def rows(self, sequence: TokenSequence) -> Tensor:
        """Return the row `[1, hidden]` of the last slot of a sequence, from which its next token is drafted."""
        end = len(sequence) - 1
        if self._follow(sequence, end) and self._last is not None:
            self._rows = self._last
            return self._rows
        tokens = upload(torch.tensor(sequence.tokens[self.cache.length + 1 :]), self.model.device)
        for ids in tokens.split(self._most):
            features = self._features(sequence, self.cache.length, len(ids))
            self._last = self._rows = self.model.run(ids, features, self.cache)[-1:]
        self._true = max(self._true, min(end, self.sources[0].rows_kept(sequence).stop))
        return self._rows

    def _follow(self, sequence: TokenSequence, end: int) -> bool:
        """Drop the slots that are not the sequence's, or not true ones, and those before the window of `end`.

        Return whether all slots before `end` stay, and no others are there.
        """
        unchanged = sequence.marks.unchanged(self) if sequence.marks is self._marks else 0
        sequence.marks.update(self, len(sequence))
        self._marks, self._tree = sequence.marks, None
        kept = max(min(unchanged - 1, self._true), 0)
        if self._last is None or kept != end:
            kept = min(kept, end - 1)  # at least one slot is run, for its row
        self._true = min(self._true, kept)
        if kept < self._first or self.cache.truncate(min(kept, self.cache.length)) < kept:
            self.cache.truncate(0)
            self._true = self._first = 0
        first, kept_rows = end, [source.rows_kept(sequence) for source in self.sources]
        while starts := [positions.start for positions in kept_rows if first - 1 in positions]:
            first = min(starts)  # there may be gaps before: a source has not run all that another one has
        first = max(first, end - self.reach, 0)
        if self.cache.length < first:
            self.cache.truncate(0)
            self.cache.skip(first)
            self._first = first
        return self.cache.length == end

    def _features(self, sequence: TokenSequence, start: int, count: int) -> Tensor:
        """Return the features of slots, each from the first source that has its row."""
        parts, at, end = [], start, start + count
        while at < end:
            source = next(source for source in self.sources if at in source.rows_kept(sequence))
            stop = min(source.rows_kept(sequence).stop, end)
            assert source.kept is not None
            parts.append(self.model.features(source.kept.get(at, stop)))
            at = stop
        return torch.cat(parts)

    def forward(self, ids: Tensor, parents: Sequence[int] | None = None) -> Tensor:
        """Run drafted tokens `[tokens]` behind the last slot, or as nodes of a tree; return their rows.

        `parents` are as of `Runner.forward`.
        """
        if parents is None:
            self._rows = self.model.run(ids, self.model.recycled(self._rows), self.cache)
            return self._rows
        before = () if self._tree is None else self._tree.parents
        self._tree = tree_of((*before, *parents))
        above = upload(torch.tensor([parent + 1 for parent in parents]), self.model.device)
        features = self.model.recycled(self._rows.index_select(0, above))
        rows = self.model.run(ids, features, self.cache, self._tree)
        self._rows = torch.cat((self._rows, rows))
        return rows

    def logits(self, rows: Tensor) -> Tensor:
        """Return logits `[slots, vocab]` in fp32 over the target's vocabulary."""
        return self.model.logits(rows)

    def resolve(self, ids: Sequence[int]) -> None:
        """Do nothing: the next call with a sequence drops drafted slots anyway."""

    def observe(self, drafted: int, accepted: int) -> None:
        """Do nothing."""
