"""Build the levels of a method from its row in methods.py.

A method with a middle level is draft -> target on the retrieval cache -> target on the full cache. Without a middle
level, the full cache verifies the draft itself. Without a drafter, the target decodes token by token.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ...architecture.footprint import PAGE_GRAIN
from ...caches.block_table import TableCache
from ...caches.chunk_table import ChunkTableCache
from ...caches.full import FullCache
from ...caches.plane import PlaneCache
from ...caches.retrieval import CopiedCache, QuantizedCopiedCache
from ...caches.selected import SelectedCache
from ...caches.selection import Refresh
from ...caches.streaming_llm import StreamingCache
from ...events import MaskStatistics, Speculated
from ...kernels import triton
from ...memory.block_store import BlockStore
from ...memory.packed_store import PackedStore
from ...memory.plain_store import PlainStore
from ...memory.quantized_store import QuantizedStore
from ...memory.store import Store
from ...model.decoder import Model
from ...parallel import ALONE, Group
from ...settings.config import LONGEST_GAMMA, Speculation
from ...settings.kv_formats import EXACT, KV_FORMATS, PLANE_KV
from ...settings.method_sizes import (
    budget_of,
    draft_chunk,
    drafter_kind,
    format_of,
    middle_kind,
    selected_chunk,
    tail_tokens,
)
from ...settings.methods import LOOKUP, METHODS, MIDDLES, MODEL
from ...settings.tree_settings import TreeSampling
from ..auto.adaptive import HORIZON, AdaptiveScheduler
from ..drafters.dflash import DFlashDrafter, DFlashRunner
from ..drafters.drafter import (
    SELECTED_PRIOR,
    Drafter,
    DraftRunner,
    ModelDrafter,
    ParallelDrafter,
    SelectedDrafter,
)
from ..drafters.grown_tree import TRAINED, Growth
from ..drafters.heads import HeadDrafter, HeadRunner, ParallelHeadDrafter
from ..drafters.ngram import LookupDrafter
from ..passes.estimators import ROW_COST
from ..passes.runner import Runner
from ..passes.selected_runner import SelectedRunner
from ..passes.steps import Executor
from ..sampling.warp import Sampler
from ..trees.drafted_trees import DraftTrees, draft_trees
from .level import Level, LogprobsRecorder, Verifier

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


def draft_cache(model: Model, settings: Speculation) -> StreamingCache:
    """Return an empty StreamingLLM cache for a draft model."""
    chunk = draft_chunk(settings)
    length = settings.sink + settings.window + chunk
    sizes = settings.sink, settings.window, chunk, model.dtype, model.device
    return StreamingCache(model.shape, model.rope(length), *sizes, model.sliding_rope(length), model.new_states())


def selected_cache(full: FullCache, settings: Speculation, middle: str | None = None) -> SelectedCache:
    """Return the cache of a middle level over a full one; its chunks are multiples of the store's grain.

    `middle` is one of methods.MIDDLES; without it, the one of the settings.
    """
    store = full.store
    # On a GPU also pages that are not the kernel's blocks are selected in their size, which the plan counts on.
    is_paged = store.span and store.device.type != "cpu"
    name = middle or middle_kind(settings)
    assert name is not None, "there is a middle level"
    chosen = MIDDLES[name]
    kind = format_of(chosen.name, settings)
    kind = kind if not KV_FORMATS[kind].is_copied or _may_quantize(store) else EXACT
    grain = max(store.grain, PAGE_GRAIN if is_paged else 1, KV_FORMATS[kind].grain)
    chunk = selected_chunk(settings, grain, store.span, full.capacity)
    selector = chosen.load()(settings.sink, chunk)
    if chosen.scores:
        store.keep_mean_keys(chunk)
    if chosen.follows:
        full.followers.add(selector)
    budget = max(full.capacity if chosen.whole else budget_of(settings, full.capacity), 2 * chunk)
    sizes = budget, chunk, tail_tokens(settings)
    return _selected_class(store, kind)(full, selector, Refresh(settings.rebuild_every), *sizes, kind)


def _may_quantize(store: Store) -> bool:
    """Return whether a kernel attends to quantised copies of what a full cache's store has."""
    is_near = store.device.type != "cpu" or store.kernel is None  # its copies are plain keys and values
    has_kernel = triton.why_not(store.device, store.dtype, store.shape.head_dim) is None
    return isinstance(store, BlockStore) or (is_near and has_kernel and not store.shape.caps_scores)


def may_have_alternative(full: FullCache) -> bool:
    """Return whether there may be another selected cache over a full one.

    It takes a block table alone, or a copy in a CPU's memory of KV that is streamed, where passes are slow. `auto` does
    not weigh the cost of making that copy: over recorded texts, delaying the copy cost more than it saved.
    """
    store = full.store
    return _selected_class(store) is TableCache or (store.span > 0 and store.device.type == "cpu")


def _selected_class(store: Store, kind: str = EXACT) -> type[SelectedCache]:
    """Return the class of the retrieval cache over a full cache's store: one without a copy, where a kernel can."""
    if kind == PLANE_KV.name:
        return PlaneCache
    if isinstance(store, BlockStore | PackedStore | QuantizedStore) and not store.span:  # not over tiers
        return TableCache
    if not KV_FORMATS[kind].is_plain:
        return QuantizedCopiedCache
    if not isinstance(store, PlainStore) or store.shape.caps_scores or store.shape.has_sinks:
        return CopiedCache
    return ChunkTableCache if triton.serves(store.layer(0)[0][:1]) else CopiedCache


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
            in_one_pass = self.draft.model.shape.mask_token is not None
            self.draft.longest = LONGEST_GAMMA + 1 if adaptive or in_one_pass else _CATCHING_UP

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

    With trees, the lowest drafter drafts them; without a drafter, the target on selected chunks. A draft model grows
    them for the full cache alone. An adaptive method drafts trees for the full cache, where they are faster than
    chains. `logprobs` records the log-probabilities of the tokens that are emitted.
    """
    method = METHODS[settings.method]
    drafters = _drafters(runners, settings, sampler, group)
    full_row = runners.full.row_cost() if drafters or runners.middle is not None else ROW_COST
    shape = settings.tree_shape
    grows = shape.kind == "grown"
    trees = draft_trees(shape, TreeSampling(settings.tree_sampling), may_be_chain=method.adaptive)
    growing: list[Drafter] = []
    if grows and drafter_kind(settings) == MODEL:
        growth = Growth(shape.nodes or 0, TRAINED, full_row, drafters[0].relative_cost)
        growing = _drafters(runners, settings, sampler, group, growth)

    def level(
        verifier: Verifier,
        over: list[Drafter],
        gamma: int | None,
        prior: float = SELECTED_PRIOR,
        trees: Callable[[bool], DraftTrees] | None = trees,
    ) -> Level:
        cost = full_row if verifier is full else ROW_COST
        scheduler = AdaptiveScheduler(over, gamma, method.adaptive, horizon, trees, cost)
        name = "target" if verifier is full else verifier.name
        return Level(name, verifier, scheduler, sampler.generator, clock, group, prior)

    full = Verifier("full", runners.full, sampler, logprobs)
    if runners.middle is None:
        over = [*drafters, *growing] if method.adaptive else growing or drafters
        top = level(full, over, settings.gamma2)
        return Hierarchy(settings.method, top, (top,))
    kind = middle_kind(settings)
    assert kind is not None, "there is a middle level"
    name = _middle_name(kind, runners.middle)
    prior = MIDDLES[kind].acceptance
    branching: list[Drafter] = (
        [SelectedDrafter(name, runners.middle, sampler, prior, shape.nodes or 0)] if grows else []
    )
    if (trees is not None or grows) and not drafters:
        top = level(full, branching or [SelectedDrafter(name, runners.middle, sampler, prior)], settings.gamma2)
        return Hierarchy(settings.method, top, (top,))

    def lower(kind: str, runner: SelectedRunner) -> Level:
        prior = MIDDLES[kind].acceptance * (1.0 if runner.copy is None else runner.copy.agreement)
        verifier = Verifier(_middle_name(kind, runner), runner, sampler)
        return level(verifier, drafters, settings.gamma1, prior, None if method.adaptive else trees)

    middles = [lower(kind, runners.middle)]
    if runners.alternative is not None and method.alternative is not None:
        middles.append(lower(method.alternative, runners.alternative))
    over = [*drafters, *growing, *middles, *branching] if method.adaptive else [*middles, *branching]
    top = level(full, over, settings.gamma2, trees=trees if method.adaptive else None)
    return Hierarchy(settings.method, top, (top, *middles))


def _middle_name(kind: str, runner: SelectedRunner) -> str:
    return kind if runner.copy is None else f"{kind}-{runner.copy.level}"


def _drafters(
    runners: Runners, settings: Speculation, sampler: Sampler, group: Group, growth: Growth | None = None
) -> list[Drafter]:
    """Return the method's drafter, if it has one; of trees that grow, if it is a model and there is `growth`."""
    kind = drafter_kind(settings)
    if kind == MODEL:
        assert runners.draft is not None
        if isinstance(runners.draft, HeadRunner):
            cls = HeadDrafter if runners.draft.model.own.mask_token is None else ParallelHeadDrafter
            cls = DFlashDrafter if isinstance(runners.draft, DFlashRunner) else cls
            return [cls(runners.draft, sampler, group, growth)]
        is_parallel = runners.draft.model.shape.mask_token is not None
        return [(ParallelDrafter if is_parallel else ModelDrafter)(runners.draft, sampler, group, growth)]
    return [runners.lookup] if kind == LOOKUP else []
