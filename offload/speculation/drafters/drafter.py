"""The protocol of drafters, the drafter that runs a draft model, and that model's runner."""

from collections.abc import Generator, Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...caches.streaming_llm import StreamingCache
from ...events import DraftPrefilled
from ...memory.host_memory import download
from ...model.decoder import Model
from ...parallel import ALONE, Group
from ...sequence import TokenSequence
from ...settings.methods import MIDDLES, RETRIEVAL
from ..passes.runner import Runner
from ..passes.selected_runner import SelectedRunner
from ..sampling.warp import Sampler, read_tokens
from ..trees.tree import Draft, DraftedTree
from .draft_passes import DraftPasses
from .tree_drafter import TreeDrafting

LONGEST_DRAFT = 24  # tokens, unless there is room for more
SELECTED_PRIOR = MIDDLES[RETRIEVAL].acceptance


class Drafter(Protocol):
    """Proposes the next tokens. A level of speculation is a drafter for the level above it."""

    name: str
    relative_cost: float  # prior: the time per drafted token, relative to a plain step of the verifier
    branches: bool  # whether it can draft trees
    longest: int  # tokens of its drafts, at most: the depth of trees

    def draft_kind(self, sequence: TokenSequence) -> Hashable:
        """Return the kind of draft that `propose` would return now, or None if it would be empty.

        The scheduler estimates an acceptance rate for each kind.
        """

    def prior(self, kind: Hashable) -> float:
        """Return the acceptance rate to expect of drafts of a kind, until measurements replace it."""

    @property
    def setups(self) -> int:
        """How many one-off costs, such as selections of a retrieval cache, its drafts have included so far."""

    def setup_cost(self, sequence: TokenSequence) -> float:
        """Estimate the one-off cost that the next draft would include, in plain steps of the target; 0 if none."""

    def propose(self, sequence: TokenSequence, limit: int, tree: DraftedTree | None = None) -> Draft:
        """Return up to `limit` tokens that may follow the sequence, which is unchanged afterwards.

        With a `tree`, a drafter that can branch returns a tree of that shape or a smaller one, up to the depth `limit`.
        Sampled tokens must not be filtered by their value: the verification would no longer be lossless.
        """

    def observe(self, drafted: int, accepted: int) -> None:
        """Note how many tokens of the last draft were accepted."""


class ModelDrafter:
    """A draft model that decodes plainly on a small cache. Its runner bars tokens that the target does not have."""

    name = "draft"
    relative_cost = 0.2
    setups = 0
    branches = True
    longest = LONGEST_DRAFT
    fades = False  # whether a draft's later tokens are accepted at another rate than its first

    def __init__(self, runner: Runner, sampler: Sampler, group: Group = ALONE) -> None:
        """Every rank of a `group` runs the whole draft model; the tokens that rank 0 draws are used by all.

        The tokens of a draft stay on the device until its end, and come to the host by one copy. Penalties need them
        on the host at once, with a copy for each.
        """
        self._runner = runner
        self._sampler = sampler
        self._group = group
        self._passes = DraftPasses(runner, sampler)
        self._trees = TreeDrafting(runner.model, self._passes, sampler, group)

    def draft_kind(self, sequence: TokenSequence) -> Hashable:
        return True

    def prior(self, kind: Hashable) -> float:
        return 0.6

    def setup_cost(self, sequence: TokenSequence) -> float:
        return 0.0

    @torch.inference_mode()
    def propose(self, sequence: TokenSequence, limit: int, tree: DraftedTree | None = None) -> Draft:
        if tree is not None:
            return self._trees.propose(sequence, tree.within(limit))
        sampler, passes, before = self._sampler, self._passes, sequence.tentative
        drawn: list[Tensor] = []
        rows: list[Tensor] = []
        logits = passes.first(sequence, limit)
        while True:
            rows.append(sampler.distribution(logits, before))
            drawn.append(passes.ids(sampler.draw(rows[-1][0], len(sequence) + len(drawn))))
            if len(drawn) == limit:
                break
            if sampler.reads_history:
                before += download(drawn[-1])
            logits = passes.following(drawn[-1])
        is_needed = sampler.noise is None and not sampler.sampling.greedy  # one-hot rows need not be told
        distributions = torch.cat(rows if is_needed else [row[:, :1] for row in rows])
        tokens = read_tokens(torch.cat(drawn), distributions)
        passes.resolve(tokens[:-1])  # this rank's tokens: they are in its cache
        agreed = [int(token) for token in self._group.agree(tokens)]
        return Draft(agreed, passes.spread(distributions) if is_needed else None)

    def observe(self, drafted: int, accepted: int) -> None:
        self._runner.observe(drafted, accepted)


class SelectedDrafter(ModelDrafter):
    """The target itself, which drafts trees on selected chunks of its full cache."""

    def __init__(
        self,
        name: str,
        runner: SelectedRunner,
        sampler: Sampler,
        acceptance: float = SELECTED_PRIOR,
    ) -> None:
        """The ranks that share the target agree on every token; `acceptance` is expected until it is known."""
        super().__init__(runner, sampler)
        self.name, self._prior = name, acceptance
        self._selected = runner

    def prior(self, kind: Hashable) -> float:
        return self._prior

    @property
    def relative_cost(self) -> float:
        return self._selected.relative_cost

    @property
    def setups(self) -> int:
        return self._selected.setups

    def setup_cost(self, sequence: TokenSequence) -> float:
        return self._selected.setup_cost(sequence)


WINDOWS = 4  # that are run: keys of the last one depend, layer by layer, on tokens of the ones before


class DraftRunner(Runner):
    """A runner on a StreamingCache.

    Of a sequence that is far ahead of the cache, it runs the sink and the last windows only. What a draft model
    proposes may change with it, and so its acceptance, but no output.
    """

    def __init__(self, model: Model, cache: StreamingCache, chunk: int) -> None:
        super().__init__(model, cache, chunk)
        self._sink, self._tail = cache.sink, WINDOWS * cache.window

    def read(self, sequence: TokenSequence) -> Generator[DraftPrefilled]:
        """Run the tokens that the cache lacks and can keep, a chunk at a time; counts are of the tokens to run."""
        self._skip(sequence)
        first, end = self.num_cached, len(sequence)
        if first < end:
            for event in self.prefill(sequence):
                yield DraftPrefilled(event.done - first, end - first)

    def rows(self, sequence: TokenSequence, draft: Sequence[int] = ()) -> Tensor:
        self._skip(sequence)
        return super().rows(sequence, draft)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits as a runner does, with -inf for the tokens that the target does not have.

        So what is drawn and the distribution that the verification sees are of the other tokens alone.
        """
        logits, barred = super().logits(hidden), self.model.barred
        return logits if barred is None else logits.index_fill(1, barred, float("-inf"))

    @property
    def attended(self) -> int:
        return min(self._sink + self.cache.window, self.cache.length)

    def _skip(self, sequence: TokenSequence) -> None:
        """If the cache is far behind, run what is missing of the sink, and drop all tokens before the last windows."""
        first = len(sequence) - self._tail
        if self._matching_prefix(sequence) < len(sequence) or self._last is None:
            self._truncate(min(self.num_cached, len(sequence) - 1))  # the cache may start over
        while self.num_cached < min(self._sink, first):
            self._run(sequence.tokens[self.num_cached : min(self._sink, first, self.num_cached + self.chunk)])
        if self.num_cached < first:
            self._last = None
            self.cache.skip(first)
            self._cached += sequence.tokens[self.num_cached : first]
