"""A model with the cache of one sequence: synchronise the cache with the sequence, and return hidden rows.

Only a runner truncates a cache: it compares the cached tokens with the sequence, truncates the cache to their longest
common prefix, and runs the other tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ...caches.full import FullCache
from ...caches.protocol import KVCache
from ...events import Prefilled
from ...memory.host_memory import upload
from ...memory.tree_attention import Tree, tree_of
from ...model.decoder import Model
from ...sequence import TokenSequence, Watermarks, common_prefix
from .cuda_graphs import StepGraphs, graphs_for
from .estimators import ATTENTION_COST, ROW_COST
from .hidden_rows import HiddenRows
from .steps import Lane, Step

Cache = TypeVar("Cache", bound=KVCache)


class Runner(Generic[Cache]):
    """One model, one cache, one sequence at a time.

    `rows` accepts any sequence. If it shares no prefix with the cached tokens, it takes as long as a prefill.

    Attributes:
        chunk: tokens of a prompt that are run in one pass.
        kept: the hidden rows of the latest tokens, for drafters; see `keep_rows`.
        lane: of a batch: runs the passes with those of other sequences.
        longest: tokens of the longest pass of decoding that is recorded ahead of it.
    """

    def __init__(self, model: Model, cache: Cache, chunk: int = 512, by_layers: bool = False) -> None:
        """With `by_layers`, run prompts layer by layer, for a FullCache whose keys and values are offloaded."""
        self.model, self.cache, self.chunk = model, cache, chunk
        self.kept: HiddenRows | None = None
        self.graphs: StepGraphs | None = graphs_for(model, cache)
        self.lane: Lane | None = None
        self.longest = 1
        self._by_layers = by_layers
        self._cached: list[int] = []  # tokens whose keys and values are in the cache
        self._last: Tensor | None = None  # [1, hidden], the row of the last cached token
        self._marks: Watermarks | None = None  # of the sequence last compared with the cached tokens
        self._tree: Tree | None = None  # of the nodes in flight, in the order in which they were run
        self._nodes: list[int] = []  # their tokens

    @property
    def num_cached(self) -> int:
        """Number of tokens in the cache."""
        return len(self._cached)

    @property
    def attended(self) -> int:
        """Number of keys that the next token attends to, nearly."""
        return self.cache.length

    @property
    def relative_cost(self) -> float:
        """The estimated time of a step, in plain steps of the full cache."""
        return 1.0

    @property
    def setups(self) -> int:
        """Number of passes so far that had a one-off cost."""
        return 0

    def setup_cost(self, sequence: TokenSequence) -> float:
        """Estimate the one-off cost of the next pass, in plain steps of the full cache; 0 if there is none."""
        return 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        """Note how many tokens drafted from this runner's rows were accepted."""

    def keep_rows(self, window: int) -> None:
        """Keep the hidden rows of the latest `window` tokens from now on, for drafters; 0 for none.

        A later `prefill` runs the last tokens of a prompt again whose rows are not there.
        """
        if window != (0 if self.kept is None else self.kept.window):
            self.kept = HiddenRows(window) if window else None

    def rows_kept(self, sequence: TokenSequence) -> range:
        """Return the positions of the tokens, of those that a sequence still has, whose rows are kept."""
        if self.kept is None or self._marks is not sequence.marks:
            return range(0)
        return range(self.kept.first, min(self.kept.length, sequence.marks.unchanged(self)))

    def _with_last_rows(self, length: int, cached: int) -> int:
        """Return after how many of `cached` tokens a prompt of `length` has to go on, for its last rows to be kept.

        A cache whose layers with a window or with linear attention could not go on there keeps its tokens.
        """
        if self.kept is None or not isinstance(self.cache, FullCache):
            return cached
        first = max(length - self.kept.window, 0)
        if cached <= first or self.kept.first <= first <= cached <= self.kept.length:
            return cached
        first -= first % self.chunk  # chunks, and so the bits of torch's sums, are those of a fresh prompt
        return first if self.cache.continues(first) else cached

    def prefill(self, sequence: TokenSequence, end: int | None = None) -> Generator[Prefilled]:
        """Run the sequence's tokens that are not in the cache, a chunk at a time. Closing it early keeps whole chunks.

        With `end`, run only the tokens before that position.
        """
        end = len(sequence) if end is None else end
        cached = min(self._matching_prefix(sequence), end - 1)
        self._truncate(self._with_last_rows(end, cached) if end == len(sequence) else cached)
        yield Prefilled(self.num_cached, len(sequence))
        self.prepare()
        if self._by_layers and end - self.num_cached > self.chunk:
            yield from self._prefill_by_layers(sequence, end)
        while self.num_cached < end:
            self._run(sequence.tokens[self.num_cached : min(self.num_cached + self.chunk, end)])
            yield Prefilled(self.num_cached, len(sequence))

    def _prefill_by_layers(self, sequence: TokenSequence, end: int) -> Generator[Prefilled]:
        """Run the prompt in one pass. Closing it early keeps nothing. Progress by layers is reported in tokens."""
        assert isinstance(self.cache, FullCache)
        cached, ids = self.num_cached, sequence.tokens[self.num_cached : end]
        self._last = None
        rows = 1 if self.kept is None else self.kept.window
        run = self.model.forward_by_layers(self._id_tensor(ids), self.cache, self.chunk, rows)
        try:
            while True:
                yield Prefilled(cached + (len(ids) - 1) * next(run) // self.model.shape.layers, len(sequence))
        except StopIteration as finished:
            hidden = finished.value
        self._cached += ids
        self._last = hidden[-1:]
        if self.kept is not None:
            self.kept.put(self.num_cached - len(hidden), hidden)
        yield Prefilled(self.num_cached, len(sequence))

    def prepare(self) -> None:
        """Record the passes of decoding that can be recorded, up to the longest one. The pass before it is lost."""
        if self.graphs is not None:
            self.graphs.prepare(self.longest)

    def restore(self: Runner[FullCache], start: int, ids: Sequence[int], kv: Tensor) -> None:
        """Restore tokens from position `start` on instead of running them; see `FullCache.restore`."""
        self._truncate(start)
        assert start == self.num_cached, "a gap before the restored tokens"
        self._last = None
        self.cache.restore(len(ids), kv)
        self._cached += ids

    def restore_states(self: Runner[FullCache], length: int, states: Tensor) -> None:
        """Restore the states of layers with linear attention behind the first `length` restored tokens."""
        self.cache.restore_states(length, states)
        del self._cached[length:]

    def adopt(self: Runner[FullCache], ids: Sequence[int]) -> None:
        """Take the first tokens of an empty FullCache as cached: its store shares them with another sequence's."""
        self.cache.adopt(len(ids))
        self._cached += ids

    def row_cost(self: Runner[FullCache]) -> float:
        """Estimate the time of each further row of a pass on a FullCache, relative to a plain step.

        Keys and values that a pass reads over a link, it reads once for all its rows. All ranks return the same.
        """
        weights, shape = self.model.read_cost, self.model.shape
        kv = ATTENTION_COST * shape.full_attention.kv_bytes(1, self.model.dtype.itemsize) * self.num_cached
        share = (weights + kv) / (weights + self.cache.store.read_cost * kv)
        (agreed,) = self.model.group.agree([share])
        return ROW_COST * agreed

    def deepest_tree(self, sequence: TokenSequence) -> int:
        """Return how deep a tree of drafts behind a sequence, whose last token is run with it, may be."""
        if not isinstance(self.cache, FullCache):
            return sys.maxsize
        return self.cache.store.deepest_tree(len(sequence) - 1) - 1

    def rows(self, sequence: TokenSequence, draft: Sequence[int] = (), parents: Sequence[int] | None = None) -> Tensor:
        """Return hidden rows `[len(draft) + 1, hidden]`: of the sequence's last token, then of each draft token.

        With the `parents` of a tree, a draft token follows those on its path. The draft stays in the cache until the
        next call with a sequence, which keeps the part that the sequence goes on with.
        """
        last, pending = self._synchronise(sequence), sequence.tokens[self.num_cached :]
        behind = len(draft) if parents is None else 0  # tokens that are run with the last pending ones
        most = max(self.chunk, behind + 1) if parents is None else 1
        while len(pending) + behind > most:
            size = min(self.chunk, len(pending) - 1)  # the wanted rows come from one pass
            self._run(pending[:size])
            del pending[:size]
        ids, count, tree = [*pending, *draft], len(pending), None
        if last is not None and not ids:
            return last
        if parents is not None:
            tree = [*range(-1, count - 1), *(parent + count for parent in parents)]
        rows = self._run(ids, tree)
        return rows[-len(draft) - 1 :] if last is None else torch.cat((last, rows))

    def forward(self, ids: Tensor, parents: Sequence[int] | None = None) -> Tensor:
        """Run tokens `[tokens]` of the device behind those in the cache; return their hidden rows `[tokens, hidden]`.

        The host need not know the ids, which are in the model's vocabulary, so it does not wait for them. Until it
        gives them to `resolve`, they do not count as cached: the next call with a sequence drops them.

        With `parents`, they are nodes of a tree: `parents` are numbers of nodes, in the order in which they were run
        since the last call with a sequence; -1 is the last cached token.
        """
        tree = None
        if parents is not None:
            tree = tree_of((*(() if self._tree is None else self._tree.parents), *parents))
        else:
            self._last = None
        if self.lane is not None:
            hidden = self.lane.forward(Step(self.model, self.cache, ids, self.attended, tree, self.graphs))
        elif self.graphs is not None and self.graphs.serves(len(ids), tree):
            hidden = self.graphs.forward(ids)
        else:
            hidden = self.model.forward(ids, self.cache, tree)
        if tree is not None:
            self._tree = tree
        else:
            self._last = hidden[-1:]
        if self.kept is not None and tree is None:
            self.kept.put(self.cache.length - len(ids), hidden)
        elif self.kept is not None:
            self.kept.hold(hidden)
        return hidden

    def resolve(self, ids: Sequence[int]) -> None:
        """Note the ids of the tokens that the last passes ran, in order."""
        if self._tree is not None:
            self._nodes += ids
            return
        assert self.num_cached + len(ids) <= self.cache.length, "more ids than tokens that were run"
        self._cached += ids

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[tokens, vocab]` in fp32 of hidden rows `[tokens, hidden]`."""
        return self.model.logits(hidden) if self.lane is None else self.lane.logits(self.model, hidden)

    def settle(self, sequence: TokenSequence) -> None:
        """Drop from the cache the tokens that are not in the sequence, such as a rejected draft."""
        self._truncate(self._matching_prefix(sequence))

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` tokens in the cache."""
        self._truncate(min(length, self.num_cached))

    def _synchronise(self, sequence: TokenSequence) -> Tensor | None:
        """Truncate the cache to its common prefix with the sequence; return the last token's row if it is kept."""
        agreed = self._matching_prefix(sequence)
        if agreed == len(sequence) == self.num_cached and self._last is not None:
            return self._last
        self._truncate(min(agreed, len(sequence) - 1))
        return None

    def _matching_prefix(self, sequence: TokenSequence) -> int:
        """Return how many leading tokens of the sequence are in the cache."""
        if not self.cache.is_intact:
            self._cached.clear()
        unchanged = sequence.marks.unchanged(self)
        if sequence.marks is not self._marks:  # the runner followed another sequence since its last update
            unchanged = 0
        agreed = common_prefix(self._cached, sequence.tokens, min(unchanged, self.num_cached))
        # Tokens after the common prefix may match the sequence again later, but no watermark would say so.
        del self._cached[agreed:]
        # Last: an interrupt before must not leave tokens that were not compared.
        sequence.marks.update(self, len(sequence))
        self._marks = sequence.marks
        self._last = self._last if agreed == self.cache.length else None
        if self._tree is None:
            return agreed
        tree, ids, self._tree, self._nodes = self._tree, self._nodes, None, []
        return agreed + self._keep_path(tree, ids, sequence.tokens[agreed:])

    def _keep_path(self, tree: Tree, ids: Sequence[int], following: Sequence[int]) -> int:
        """Commit the path of the tree in flight along which the sequence goes on, and drop the others.

        Returns the tokens of the path. Nothing is kept if the cache has lost the tree, or the sequence has left it.
        """
        rows = None if self.kept is None else self.kept.release()
        if self.num_cached < self.cache.length or not self.cache.held == len(tree) == len(ids):
            return 0
        path = tree.follow(ids, following)
        if path:
            self._last = None
            self.cache.commit(path)  # first: an interrupt between the two must not leave more tokens than keys
            self._cached += following[: len(path)]
            if self.kept is not None and rows is not None:  # those of a tree before `keep_rows` are not there
                self.kept.put(self.num_cached - len(path), rows[path])
        return len(path)

    def _truncate(self, length: int) -> None:
        del self._cached[length:]  # first: an interrupt between the two must not leave more tokens than keys
        if length < self.cache.length:
            self._last = None
            del self._cached[self.cache.truncate(length) :]
        if self.kept is not None:
            self.kept.truncate(self.num_cached)

    def _run(self, ids: Sequence[int], parents: Sequence[int] | None = None) -> Tensor:
        hidden = self.forward(self._id_tensor(ids), parents)
        self.resolve(ids)
        return hidden

    def _id_tensor(self, ids: Sequence[int]) -> Tensor:
        """Return ids clamped to the model's vocabulary: a target with a padded one may emit ids that a draft lacks."""
        return upload(torch.tensor(ids).clamp_(max=self.model.shape.vocab - 1), self.model.device)
