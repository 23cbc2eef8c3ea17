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
from ..auto.adaptive import AdaptiveScheduler
from ..auto.cycle import Cycle
from ..drafters.drafter import LONGEST_DRAFT, Drafter
from ..passes.runner import Runner
from ..sampling.warp import Sampler
from ..trees.tree import NOTHING, Draft, DraftedTree, Verdict, chain, paths
from ..trees.verification import verify, verify_choices


class Level:
    """The target on one of its caches, which verifies what a scheduler's drafters propose; itself a Drafter, of chains.

    Attributes:
        name: as a drafter.
        statistics: of each drafter that it has verified.
        using: the name of the drafter of the last verification.
        logprobs: log-probabilities of the tokens that the last verification emitted; empty unless they are asked for.
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
        prior: float = 0.9,
        logprobs: int | None = None,
        verifier: str | None = None,
    ) -> None:
        """Create a level.

        Args:
            prior: the rate at which the next level is expected to accept this one's tokens.
            logprobs: how many likeliest tokens each emitted one is listed with; None for no log-probabilities.
            verifier: the name of the cache in statistics, if it is not `name`.
        """
        self.name, self._prior, self._verifier = name, prior, verifier or name
        self._runner, self._sampler, self._scheduler = runner, sampler, scheduler
        self._clock, self._group, self._likeliest = clock, group, logprobs
        self.statistics: dict[str, LevelStatistics] = {}
        self.relative_cost = runner.relative_cost
        self.using = "none"
        self.logprobs: tuple[Logprobs, ...] = ()

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
        """The gain of drafting over plain steps of the verifier; see `Speculated.gain`."""
        return self._scheduler.gain

    def advance(self, sequence: TokenSequence, limit: int, with_rows: bool = False) -> Draft:
        """Draft and verify once: append 1 to `limit` tokens to the sequence, and return them.

        A draft has at most `limit` - 1 tokens, because the verifier adds one. `with_rows`, the tokens come with the
        distributions that they were drawn from.
        """
        start, setups = self._clock(), self._runner.setups
        drafter, gamma = self._scheduler.choose(sequence, limit - 1)
        shape, draft, has_setup = self._scheduler.tree, NOTHING, False
        if shape is not None:
            gamma = min(gamma, self._runner.deepest_tree(sequence))
        if drafter is not None and gamma:
            before = drafter.setups
            draft = self._possible(sequence, drafter.propose(sequence, gamma, shape))
            has_setup = drafter.setups > before
        drafted = self._clock()
        logits = self._runner.logits(self._runner.rows(sequence, draft.tokens, draft.parents))
        target, verdict = self._verify(sequence, draft, logits, shape, with_rows)
        draft_s, verify_s = drafted - start, self._clock() - drafted
        # All ranks use rank 0's result and times: clocks differ, and so may the last bit of a sum.
        last = verdict.path[-1] if verdict.path else -1
        *result, draft_s, verify_s = self._group.agree((last, verdict.token, draft_s, verify_s))
        last, token = map(int, result)
        path = draft.path(last)
        emitted, rows = [*(draft.tokens[node] for node in path), token], [0, *(node + 1 for node in path)]
        if self._likeliest is not None:
            self.logprobs = token_logprobs(logits[rows], emitted, self._likeliest)
        sequence.extend(emitted)
        if drafter is not None and draft.tokens:
            self._runner.settle(sequence)
            drafter.observe(draft.depth, len(path))
        else:
            drafter = None
        more = has_setup, self._runner.setups > setups, draft.parents, tuple(path)
        cycle = Cycle(drafter, emitted[0], draft.depth, len(path), draft_s, verify_s, *more)
        self._scheduler.observe(cycle)
        self._count(drafter, cycle)
        return Draft(emitted, None if target is None else target[rows])

    def _possible(self, sequence: TokenSequence, draft: Draft) -> Draft:
        """Return a draft without the tokens that a constraint rules out.

        One with distributions is unchanged: its tokens were drawn, and to drop some by their value would change the
        distribution of the output.
        """
        if draft.rows is not None or not draft.tokens:
            return draft
        kept = self._sampler.possible(sequence.tentative, draft.tokens, draft.parents or chain(len(draft.tokens)))
        return draft if len(kept) == len(draft.tokens) else draft.only(kept)

    def _verify(
        self, sequence: TokenSequence, draft: Draft, logits: Tensor, shape: DraftedTree | None, with_rows: bool
    ) -> tuple[Tensor | None, Verdict]:
        """Return the accepted part of a draft, from the logits after the sequence and after each of its tokens.

        Before it come the distributions of these rows; None where none is needed.
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
        return target, verify(draft, target, sampler.generator, sampling)

    def propose(self, sequence: TokenSequence, limit: int, tree: DraftedTree | None = None) -> Draft:
        """Return exactly `limit` tokens with the verifier's distribution, as a draft for the next level."""
        start, with_rows = len(sequence), not self._sampler.is_fixed
        rows: list[Tensor] = []
        try:
            while len(sequence) < start + limit:
                part = self.advance(sequence, start + limit - len(sequence), with_rows)
                if part.rows is not None:
                    rows.append(part.rows)
            return Draft(sequence.tokens[start:], torch.cat(rows) if with_rows else None)
        finally:
            sequence.truncate(start)

    def _count(self, drafter: Drafter | None, cycle: Cycle) -> None:
        name = self.using = "none" if drafter is None else drafter.name
        known = self.statistics.get(name, LevelStatistics(name, self._verifier))
        tree = () if cycle.parents is None else (len(cycle.parents), cycle.visits)
        self.statistics[name] = known.plus(cycle.drafted, cycle.accepted, cycle.draft_s, cycle.verify_s, *tree)


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
    return tuple(Logprobs(value, tuple(zip(ids, values, strict=True))) for value, ids, values in rows)
