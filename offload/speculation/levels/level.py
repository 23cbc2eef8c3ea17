"""One level of speculation: a drafter proposes, a verifier accepts or rejects; the output follows the verifier.

A level is itself a drafter for the level above it; TriForce is two levels.
"""

import time
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from ...events import Gain, LevelStatistics, Logprobs
from ...parallel import ALONE, Group
from ...sequence import TokenSequence
from ...settings.tree_settings import TreeSampling
from ..auto.adaptive import AdaptiveScheduler, Cycle
from ..drafters.drafter import LONGEST_DRAFT, SELECTED_PRIOR
from ..passes.runner import Runner
from ..sampling.warp import Sampler
from ..trees.tree import NOTHING, Draft, DraftedTree, Verdict, chain, paths
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


class Level:
    """The target on one of its caches, which verifies what a scheduler's drafters propose; itself a Drafter, of chains.

    Attributes:
        name: as a drafter.
        statistics: of each drafter that it has verified.
        using: the drafter of the last verification.
    """

    branches = False
    longest = LONGEST_DRAFT

    def __init__(
        self,
        name: str,
        runner: Runner,
        sampler: Sampler,
        scheduler: AdaptiveScheduler,
        clock: Callable[[], float] = time.perf_counter,
        group: Group = ALONE,
        prior: float = SELECTED_PRIOR,
        logprobs: LogprobsRecorder | None = None,
        verifier: str | None = None,
    ) -> None:
        """`prior`: the rate at which the next level is expected to accept this one's tokens.

        With `logprobs`, the log-probabilities of what the level emits are recorded there. `verifier` is the name of the
        cache in statistics, if it is another one.
        """
        self.name, self._prior, self._verifier = name, prior, verifier or name
        self._runner, self._sampler, self._scheduler = runner, sampler, scheduler
        self._clock, self._group, self._logprobs = clock, group, logprobs
        self.statistics: dict[str, LevelStatistics] = {}
        self.relative_cost = runner.relative_cost
        self.using = "none"

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
        start, before = self._clock(), self._runner.setups
        drafter, gamma = self._scheduler.choose(sequence, limit - 1)
        drafter_before, shape = 0 if drafter is None else drafter.setups, self._scheduler.tree
        draft = drafter.propose(sequence, gamma, shape) if drafter is not None and gamma > 0 else NOTHING
        draft = self._possible(sequence, draft)
        drafted = self._clock()
        logits = self._runner.logits(self._runner.rows(sequence, draft.tokens, draft.parents))
        target, (path, token) = self._verify(sequence, draft, logits, shape, with_rows)
        end = self._clock()
        # All ranks use rank 0's result and times: clocks differ, and so may the last bit of a sum.
        result = path[-1] + 1 if path else 0, token
        *result, draft_s, verify_s = self._group.agree((*result, drafted - start, end - drafted))
        last, token = map(int, result)
        path = draft.path(last - 1)
        accepted, emitted = len(path), [*(draft.tokens[node] for node in path), token]
        rows = [0, *(node + 1 for node in path)]
        if self._logprobs is not None:
            self._logprobs.record(logits[rows], emitted)
        sequence.extend(emitted)
        if not draft.tokens:
            drafter = None
        else:
            self._runner.settle(sequence)
            drafter.observe(draft.depth, accepted)
        setups = drafter is not None and drafter.setups > drafter_before, self._runner.setups > before
        times = draft_s, verify_s, *setups
        cycle = Cycle(drafter, emitted[0], draft.depth, accepted, *times, draft.parents, tuple(path))
        self._scheduler.observe(cycle)
        self._count(cycle)
        return Draft(emitted, None if target is None else target[rows])

    def _possible(self, sequence: TokenSequence, draft: Draft) -> Draft:
        """Return a draft without what a constraint rules out.

        One with distributions is unchanged: its tokens were drawn, and to drop some by their value would change what is
        emitted.
        """
        if draft.rows is not None or not draft.tokens:
            return draft
        kept = self._sampler.possible(sequence.tentative, draft.tokens, draft.parents or chain(len(draft.tokens)))
        return draft if len(kept) == len(draft.tokens) else draft.only(kept)

    def _verify(
        self, sequence: TokenSequence, draft: Draft, logits: Tensor, shape: DraftedTree | None, with_rows: bool
    ) -> tuple[Tensor | None, Verdict]:
        """Return what is accepted of a draft, from the logits after the sequence and after each of its tokens.

        Before it come the distributions of these rows, where tokens are drawn from more than one of them.
        """
        sampler, tentative, needed = self._sampler, sequence.tentative, None
        if draft.parents is None:
            tentative += draft.tokens
        elif sampler.reads_history:
            needed = paths(tentative, draft.tokens, draft.parents)
        if sampler.is_fixed or not (draft.tokens or with_rows):
            positions = [len(sequence), *(len(sequence) + 1 + depth for depth in draft.depths)]
            picks = sampler.choose(logits, positions, tentative, needed)
            return None, verify_choices(draft.tokens, picks, draft.parents)
        target = sampler.distribution(logits, tentative, needed)
        sampling = TreeSampling.WITHOUT_REPLACEMENT if shape is None else shape.sampling
        return target, verify_draft(draft, target, sampler.generator, sampling)

    def propose(self, sequence: TokenSequence, limit: int, tree: DraftedTree | None = None) -> Draft:
        """Return exactly `limit` tokens with the verifier's distribution, as a draft for the next level."""
        start, with_rows = len(sequence), not self._sampler.is_fixed
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
        known = self.statistics.get(name, LevelStatistics(name, self._verifier))
        tree = () if cycle.parents is None else (len(cycle.parents), cycle.visits)
        self.statistics[name] = known.plus(cycle.drafted, cycle.accepted, cycle.draft_s, cycle.verify_s, *tree)
