"""Build the levels of a method from its row in methods.py.

A method with a middle level is draft -> target on the retrieval cache -> target on the full cache. Without a middle
level, the full cache verifies the draft itself. Without a drafter, the target decodes token by token.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ...events import MaskStatistics, Speculated
from ...parallel import ALONE, Group
from ...settings.config import LONGEST_GAMMA, Speculation
from ...settings.method_sizes import drafter_kind, middle_kind
from ...settings.methods import LOOKUP, METHODS, MIDDLES, MODEL
from ...settings.tree_settings import TreeSampling
from ..auto.adaptive import HORIZON, AdaptiveScheduler
from ..drafters.drafter import (
    SELECTED_PRIOR,
    Drafter,
    DraftRunner,
    ModelDrafter,
    SelectedDrafter,
)
from ..drafters.heads import HeadDrafter, HeadRunner
from ..drafters.ngram import LookupDrafter
from ..passes.estimators import ROW_COST
from ..passes.runner import Runner
from ..passes.selected_runner import SelectedRunner
from ..passes.steps import Executor
from ..sampling.warp import Sampler
from ..trees.drafted_trees import DraftTrees, draft_trees
from .level import Level, LogprobsRecorder, Verifier

Clock = Callable[[], float]  # seconds
Trees = Callable[[], DraftTrees] | None
_CATCHING_UP = 4  # tokens that a draft model runs at once, at most: the last drafted one, those of the levels above


@dataclass(frozen=True)
class Hierarchy:
    """A method ready to run: `top` emits tokens; `levels` are all levels, the target's first."""

    method: str
    top: Level
    levels: tuple[Level, ...]

    def statistics(self, masks: MaskStatistics | None = None) -> Speculated:
        """Return the statistics of all levels so far, with those of a constraint."""
        rows = tuple([row for level in self.levels for row in level.statistics.values()])
        return Speculated(self.method, self.top.using, rows, self.top.gain, masks)


@dataclass
class Runners:
    """The runner of each model and cache, and the lookup drafter; reused from one request to the next.

    `alternative` is that of the method's alternative middle level.
    """

    full: Runner
    middle: SelectedRunner | None
    draft: DraftRunner | HeadRunner | None
    lookup: LookupDrafter
    alternative: SelectedRunner | None = None

    def use(self, executor: Executor) -> None:
        """Let `executor` run all passes from now on."""
        for runner in (self.full, self.middle, self.draft, self.alternative):
            if runner is not None:
                runner.executor = executor

    def expect(self, settings: Speculation) -> None:
        """Note the longest pass that each runner will have, so that it is recorded before decoding.

        A verification has a row more than the draft. A draft model steps by one token, after those that it lacks.
        """
        lower, upper = (LONGEST_GAMMA if gamma is None else gamma for gamma in (settings.gamma1, settings.gamma2))
        adaptive = METHODS[settings.method].adaptive
        drafts = drafter_kind(settings) is not None
        self.full.longest = upper + 1 if drafts or self.middle is not None else 1
        for middle in filter(None, (self.middle, self.alternative)):
            middle.longest = lower + 1 if drafts else 1
        if isinstance(self.draft, DraftRunner):
            self.draft.longest = LONGEST_GAMMA + 1 if adaptive else _CATCHING_UP

    def prepare(self) -> None:
        """Record passes of the middle levels before decoding; the others have done so before they read the prompt."""
        for middle in filter(None, (self.middle, self.alternative)):
            middle.prepare()


def build(
    runners: Runners,
    settings: Speculation,
    sampler: Sampler,
    clock: Clock = time.perf_counter,
    group: Group = ALONE,
    horizon: int = HORIZON,
    logprobs: LogprobsRecorder | None = None,
) -> Hierarchy:
    """Return the hierarchy of a method for an answer of `horizon` tokens. The ranks of `group` share the target.

    With trees, the lowest drafter drafts them; without a drafter, the target on selected chunks. An adaptive method
    drafts trees for the full cache, where they are faster than chains. `logprobs` records the log-probabilities of the
    tokens that are emitted.
    """
    method, shape = METHODS[settings.method], settings.tree_shape
    drafters = _drafters(runners, settings, sampler, group)
    full_row = runners.full.row_cost() if drafters or runners.middle is not None else ROW_COST
    trees = draft_trees(shape, TreeSampling(settings.tree_sampling), may_be_chain=method.adaptive)

    def level(verifier: Verifier, over: list[Drafter], gamma: int | None, trees: Trees, prior: float) -> Level:
        cost = full_row if verifier is full else ROW_COST
        scheduler = AdaptiveScheduler(over, gamma, method.adaptive, horizon, trees, cost)
        name = "target" if verifier is full else verifier.name
        return Level(name, verifier, scheduler, sampler.generator, clock, group, prior)

    def middle(kind: str, runner: SelectedRunner) -> Level:
        verifier = Verifier(kind, runner, sampler)
        return level(verifier, drafters, settings.gamma1, None if method.adaptive else trees, MIDDLES[kind].acceptance)

    full = Verifier("full", runners.full, sampler, logprobs)
    middles: list[Level] = []
    branching: list[Drafter] = []  # the middle level, where it drafts trees by itself
    if runners.middle is not None:
        kind = middle_kind(settings)
        assert kind is not None, "there is a middle level"
        if trees is not None and not drafters:
            branching = [SelectedDrafter(kind, runners.middle, sampler, MIDDLES[kind].acceptance)]
        if drafters or not branching:
            middles = [middle(kind, runners.middle)]
            if runners.alternative is not None and method.alternative is not None:
                middles.append(middle(method.alternative, runners.alternative))
    over = [*drafters, *middles, *branching] if method.adaptive else [*middles, *branching] or drafters
    top = level(full, over, settings.gamma2, None if middles and not method.adaptive else trees, SELECTED_PRIOR)
    return Hierarchy(settings.method, top, (top, *middles))


def _drafters(runners: Runners, settings: Speculation, sampler: Sampler, group: Group) -> list[Drafter]:
    """Return the method's drafter, if it has one."""
    kind = drafter_kind(settings)
    if kind == MODEL:
        assert runners.draft is not None
        if isinstance(runners.draft, HeadRunner):
            return [HeadDrafter(runners.draft, sampler, group)]
        return [ModelDrafter(runners.draft, sampler, group)]
    return [runners.lookup] if kind == LOOKUP else []
