"""One level of speculation: a drafter proposes, a verifier accepts or rejects; the output follows the verifier.

A level is itself a drafter for the level above it; TriForce is two levels.
"""

import time
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Generator, Tensor

from ...events import Gain, LevelStatistics, Logprobs
from ...parallel import ALONE, Group
from ...sequence import TokenSequence
from ...settings.tree_settings import TreeSampling
from ..auto.adaptive import AdaptiveScheduler, Cycle
from ..drafters.drafter import LONGEST_DRAFT, SELECTED_PRIOR
from ..passes.runner import Runner
from ..sampling.warp import Sampler
from ..trees.tree import NOTHING, Draft, DraftedTree, chain, paths
from ..trees.verification import verify_choices, verify_draft


@torch.inference_mode()
def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> tuple[Logprobs, ...]:
    """Return the log-probabilities of tokens, and of the `count` likeliest ones at their positions.

    Args:
        logits: `[tokens, vocab]` in fp32, of the model: before penalties and temperature.
    """
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)).squeeze(1)
    best = logprobs.topk(min(count, logits.shape[-1]), dim=-1)
    rows = zip(own.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(Logprobs(each, tuple(zip(ids, values, strict=True))) for each, ids, values in rows)


class LogprobsRecorder:
    """Keeps the log-probabilities of the tokens that the last verification has emitted."""

    def __init__(self, count: int) -> None:
        """`count`: how many of the likeliest tokens each has beside its own."""
        self._count = count
        self._found: tuple[Logprobs, ...] = ()

    def record(self, logits: Tensor, tokens: Sequence[int]) -> None:
        """Compute those of emitted tokens, from the logits `[tokens, vocab]` that each was chosen from."""
        self._found = token_logprobs(logits, tokens, self._count)

    def first(self, count: int) -> tuple[Logprobs, ...]:
        """Return those of the first `count` tokens; the others were cut off."""
        return self._found[:count]


class Verifier:
    """The target on one of its caches."""

    def __init__(self, name: str, runner: Runner, sampler: Sampler, logprobs: LogprobsRecorder | None = None) -> None:
        """With `logprobs`, the log-probabilities of what its level emits are recorded there."""
        self.name = name
        self.runner = runner
        self._sampler = sampler
        self._logprobs = logprobs
        self._logits: Tensor | None = None  # of the last score, if log-probabilities are recorded

    @property
    def is_fixed(self) -> bool:
        """Return whether what is drafted has no influence on the tokens: none is drawn."""
        return self._sampler.is_fixed

    def score(self, sequence: TokenSequence, draft: list[int], parents: Sequence[int] | None = None) -> Tensor:
        """Return the distributions after the sequence and after each token of the draft: `[len(draft) + 1, vocab]`.

        With the `parents` of a tree, those after a token follow the tokens on its path.
        """
        return self._sampler.distribution(*self._run(sequence, draft, parents))

    def choose(self, sequence: TokenSequence, draft: Draft) -> list[int]:
        """Return the tokens that the sampler chooses after the sequence and after each token of the draft."""
        logits, tentative, needed = self._run(sequence, draft.tokens, draft.parents)
        positions = [len(sequence), *(len(sequence) + 1 + depth for depth in draft.depths)]
        return self._sampler.choose(logits, positions, tentative, needed)

    def _run(
        self, sequence: TokenSequence, draft: list[int], parents: Sequence[int] | None
    ) -> tuple[Tensor, Sequence[int], Sequence[Sequence[int]] | None]:
        """Return logits after the sequence and after each token of the draft, and which tokens are before each."""
        tentative, needed = sequence.tentative, None
        if parents is None:
            logits = self.runner.scores(sequence, draft)
            tentative += draft
        else:
            logits = self.runner.logits(self.runner.tree_rows(sequence, draft, parents))
            needed = paths(tentative, draft, parents) if self._sampler.reads_history else None
        self._logits = logits if self._logprobs is not None else None  # until tokens are emitted
        return logits, tentative, needed

    def possible(self, sequence: TokenSequence, draft: Draft) -> Draft:
        """Return a draft without what a constraint rules out.

        One with distributions is unchanged: its tokens were drawn, and to drop some by their value would change what is
        emitted.
        """
        if draft.rows is not None or not draft.tokens:
            return draft
        kept = self._sampler.possible(sequence.tentative, draft.tokens, draft.parents or chain(len(draft.tokens)))
        return draft if len(kept) == len(draft.tokens) else draft.only(kept)

    def emit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Note which tokens the level emits after the last score, and from which of its rows each was chosen."""
        if self._logprobs is not None:
            logits, self._logits = self._logits, None
            self._logprobs.record(logits[list(rows)], tokens)


class Level:
    """A verifier and the scheduler that chooses its drafters; itself a Drafter, of chains."""

    branches = False
    longest = LONGEST_DRAFT

    def __init__(
        self,
        name: str,
        verifier: Verifier,
        scheduler: AdaptiveScheduler,
        generator: Generator | None,
        clock: Callable[[], float] = time.perf_counter,
        group: Group = ALONE,
        prior: float = SELECTED_PRIOR,
    ) -> None:
        """`prior`: the rate at which the next level is expected to accept this one's tokens."""
        self.name, self._prior = name, prior
        self._group = group
        self._verifier, self._runner = verifier, verifier.runner
        self._scheduler = scheduler
        self._generator = generator
        self._clock = clock
        self.statistics: dict[str, LevelStatistics] = {}
        self.relative_cost = verifier.runner.relative_cost
        self.using = "none"  # the drafter of the last verification

    def draft_kind(self, sequence: TokenSequence) -> Hashable:
        return self.name

    def prior(self, kind: Hashable) -> float:
        return self._prior

    @property
    def setups(self) -> int:
        return self._runner.setups

    def setup_cost(self, sequence: TokenSequence) -> float:
        return self._runner.setup_cost(sequence)

    def observe(self, drafted: int, accepted: int) -> None:
        self._runner.observe(drafted, accepted)

    @property
    def gain(self) -> Gain | None:
        """What drafting has gained over plain steps of the verifier; see `Speculated.gain`."""
        return self._scheduler.gain

    def advance(self, sequence: TokenSequence, limit: int, with_rows: bool = False) -> Draft:
        """Draft and verify once: append 1 to `limit` tokens to the sequence, and return them.

        A draft has at most `limit` - 1 tokens, because the verifier adds one. `with_rows`, the tokens have what they
        were drawn from.
        """
        start = self._clock()
        drafter, gamma = self._scheduler.choose(sequence, limit - 1)
        setups = 0 if drafter is None else drafter.setups, self._runner.setups
        shape = self._scheduler.tree
        draft = drafter.propose(sequence, gamma, shape) if drafter is not None and gamma > 0 else NOTHING
        draft = self._verifier.possible(sequence, draft)
        drafted = self._clock()
        target: Tensor | None = None
        if self._verifier.is_fixed or not (draft.tokens or with_rows):
            path, token = verify_choices(draft.tokens, self._verifier.choose(sequence, draft), draft.parents)
        else:
            target = self._verifier.score(sequence, draft.tokens, draft.parents)
            sampling = TreeSampling.WITHOUT_REPLACEMENT if shape is None else shape.sampling
            path, token = verify_draft(draft, target, self._generator, sampling)
        end = self._clock()
        # All ranks use rank 0's result and times: clocks differ, and so may the last bit of a sum.
        result = path[-1] + 1 if path else 0, token
        *result, draft_s, verify_s = self._group.agree((*result, drafted - start, end - drafted))
        last, token = map(int, result)
        path = draft.path(last - 1)
        accepted = len(path)
        emitted = [*(draft.tokens[node] for node in path), token]
        rows = range(last + 1) if draft.parents is None else [0, *(node + 1 for node in path)]
        self._verifier.emit(rows, emitted)
        sequence.extend(emitted)
        if draft.tokens:
            self._runner.settle(sequence)
            drafter.observe(draft.depth, accepted)
        drafter = drafter if draft.tokens else None
        included = drafter is not None and drafter.setups > setups[0], self._runner.setups > setups[1]
        cycle = Cycle(
            drafter, emitted[0], draft.depth, accepted, draft_s, verify_s, *included, draft.parents, tuple(path)
        )
        self._scheduler.observe(cycle)
        self._count(cycle)
        if target is None:
            return Draft(emitted, None)
        return Draft(emitted, target[: last + 1] if draft.parents is None else target[rows])

    def propose(self, sequence: TokenSequence, limit: int, tree: DraftedTree | None = None) -> Draft:
        """Return exactly `limit` tokens with the verifier's distribution, as a draft for the next level."""
        start, with_rows = len(sequence), not self._verifier.is_fixed
        parts: list[Draft] = []
        try:
            while len(sequence) < start + limit:
                parts.append(self.advance(sequence, start + limit - len(sequence), with_rows))
            rows = torch.cat([part.rows for part in parts]) if with_rows else None
            return Draft(sequence.tokens[start:], rows)
        finally:
            sequence.truncate(start)

    def _count(self, cycle: Cycle) -> None:
        name = self.using = cycle.drafter.name if cycle.drafter is not None else "none"
        known = self.statistics.get(name, LevelStatistics(name, self._verifier.name))
        tree = () if cycle.parents is None else (len(cycle.parents), cycle.visits)
        self.statistics[name] = known.plus(cycle.drafted, cycle.accepted, cycle.draft_s, cycle.verify_s, *tree)
