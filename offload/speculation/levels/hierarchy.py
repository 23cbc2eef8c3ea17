"""Build the levels of a method from its row in methods.py.

A method with a middle level is draft -> target on the retrieval cache -> target on the full cache. Without a middle
level, the full cache verifies the draft itself. Without a drafter, the target decodes token by token.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ...caches.full import FullCache
from ...events import MaskStatistics, Speculated
from ...parallel import ALONE, Group
from ...settings.config import LONGEST_GAMMA, Speculation
from ...settings.method_sizes import drafter_kind, middle_kind
from ...settings.methods import LOOKUP, METHODS, MIDDLES
from ...settings.tree_settings import TreeSampling
from ..auto.adaptive import HORIZON, AdaptiveScheduler
from ..drafters.drafter import Drafter
from ..drafters.model_drafter import HeadDrafter, ModelDrafter
from ..drafters.ngram import LookupDrafter
from ..passes.draft_runner import DraftRunner
from ..passes.estimators import ROW_COST
from ..passes.head_runner import HeadRunner
from ..passes.runner import Runner
from ..passes.selected_runner import SelectedRunner
from ..passes.steps import Lane
from ..sampling.warp import Sampler
from ..trees.drafted_trees import DraftTrees
from .level import Level

Clock = Callable[[], float]  # seconds
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
    """The runner of each model and cache, and the lookup drafter; reused from one request to the next."""

    target: Runner[FullCache]
    middle: SelectedRunner | None
    draft: DraftRunner | HeadRunner | None
    lookup: LookupDrafter

    def use(self, lane: Lane | None) -> None:
        """Let a `lane` of a batch run all passes from now on; None: each runs at once. Heads run by themselves."""
        for runner in (self.target, self.middle, self.draft):
            if isinstance(runner, Runner):
                runner.lane = lane

    def expect(self, settings: Speculation) -> None:
        """Note the longest pass that each runner will have, so that it is recorded before decoding.

        A verification has a row more than the draft. A draft model steps by one token, after those that it lacks.
        """
        lower, upper = (LONGEST_GAMMA if gamma is None else gamma for gamma in (settings.gamma1, settings.gamma2))
        drafts = drafter_kind(settings) is not None
        self.target.longest = upper + 1 if drafts or self.middle is not None else 1
        if self.middle is not None:
            self.middle.longest = lower + 1 if drafts else 1
        if isinstance(self.draft, DraftRunner):
            self.draft.longest = LONGEST_GAMMA + 1 if METHODS[settings.method].adaptive else _CATCHING_UP

    def drafter(self, settings: Speculation, sampler: Sampler, group: Group) -> Drafter | None:
        """Return the method's lowest drafter; None if it has none."""
        if isinstance(self.draft, HeadRunner):
            return HeadDrafter(self.draft, sampler, group)
        if self.draft is not None:
            return ModelDrafter(self.draft, sampler, group)
        return self.lookup if drafter_kind(settings) == LOOKUP else None


def build(
    runners: Runners,
    settings: Speculation,
    sampler: Sampler,
    clock: Clock = time.perf_counter,
    group: Group = ALONE,
    horizon: int = HORIZON,
    logprobs: int | None = None,
) -> Hierarchy:
    """Return the hierarchy of a method for an answer of `horizon` tokens. The ranks of `group` share the target.

    With trees, the lowest drafter drafts them; without a drafter, the target on selected chunks. An adaptive method
    drafts trees for the full cache, where they are faster than chains. `logprobs`: see `Level`.
    """
    adaptive, kind, shape = METHODS[settings.method].adaptive, middle_kind(settings), settings.tree_shape
    trees = None
    if shape.kind != "chain":
        trees = partial(DraftTrees, shape, TreeSampling(settings.tree_sampling), adaptive)
    lowest, middle = runners.drafter(settings, sampler, group), None
    drafters = [] if lowest is None else [lowest]
    if runners.middle is not None and kind is not None:
        prior = MIDDLES[kind].acceptance
        if trees is not None and lowest is None:
            drafters = [ModelDrafter(runners.middle, sampler, name=kind, acceptance=prior)]
        else:
            lower = AdaptiveScheduler(drafters, settings.gamma1, adaptive, horizon, None if adaptive else trees)
            middle = Level(kind, runners.middle, sampler, lower, clock, group, prior)
            drafters = [*drafters, middle] if adaptive else [middle]
    row_cost = runners.target.row_cost() if drafters else ROW_COST
    upper_trees = trees if adaptive or middle is None else None
    upper = AdaptiveScheduler(drafters, settings.gamma2, adaptive, horizon, upper_trees, row_cost)
    top = Level("target", runners.target, sampler, upper, clock, group, logprobs=logprobs, verifier="full")
    return Hierarchy(settings.method, top, (top,) if middle is None else (top, middle))
