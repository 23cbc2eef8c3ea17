"""The methods: which drafters and verifiers stand over each other.

auto        the levels below, switched on and off by what they bring
triforce    draft -> target on the retrieval cache -> target on the full cache
streaming   the same with the sink and the latest tokens instead of retrieved ones
retrieval   target on the retrieval cache -> target on the full cache
naive       draft model -> target on the full cache
lookup      n-gram lookup -> target on the full cache
ar          the target, token by token
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..config import Speculation
from ..decoder import Model
from ..events import Speculated
from ..kv_cache.block_store import BlockStore
from ..kv_cache.block_table import TableCache
from ..kv_cache.full import FullCache
from ..kv_cache.retrieval import SelectedCache
from ..kv_cache.selection import RecencySelector, Refresh, RetrievalSelector
from ..kv_cache.streaming_llm import StreamingCache
from ..methods import TAIL, draft_chunk
from ..parallel import ALONE, Group
from .adaptive import Pace
from .drafter import Drafter, ModelDrafter
from .level import Level, ModelVerifier, speculate
from .ngram import LookupDrafter
from .runner import Runner, SelectedRunner
from .sampling import Sampler

Clock = Callable[[], float]  # seconds


@dataclass(frozen=True)
class Hierarchy:
    """A method ready to run: `top` emits; `levels` are all levels, from the target's downwards."""

    method: str
    top: Level
    levels: tuple[Level, ...]

    def statistics(self) -> Speculated:
        """How it stands."""
        rows = tuple(row for level in self.levels for row in level.statistics.values())
        return Speculated(self.method, self.top.using, rows)


def draft_cache(model: Model, settings: Speculation) -> StreamingCache:
    """An empty StreamingLLM cache for a draft model."""
    chunk = draft_chunk(settings)
    rope = model.rope(settings.sink + settings.window + chunk)
    return StreamingCache(model.shape, rope, settings.sink, settings.window, chunk, model.dtype, model.device)


def selected_cache(full: FullCache, settings: Speculation) -> SelectedCache | TableCache:
    """The middle level's cache over a full one; its chunks are whole grains of the store."""
    store = full.store
    chunk = -(-settings.chunk // store.grain) * store.grain
    while store.span and store.span % chunk:
        chunk = min(chunk + store.grain, store.span)
    selector = (RecencySelector if settings.method == "streaming" else RetrievalSelector)(settings.sink, chunk)
    cache = TableCache if isinstance(store, BlockStore) else SelectedCache
    return cache(full, selector, Refresh(settings.rebuild_every), max(settings.budget, 2 * chunk), chunk, TAIL)


@dataclass
class Parts:
    """What hierarchies are built of: a runner for each model and cache, kept from one request to the next."""

    full: Runner
    middle: SelectedRunner | None
    draft: Runner | None
    lookup: LookupDrafter


def build(
    parts: Parts, settings: Speculation, sampler: Sampler, clock: Clock = time.perf_counter, group: Group = ALONE
) -> Hierarchy:
    """Stack the levels of a method; `group` shares the target."""
    full = ModelVerifier("full", parts.full, sampler)
    auto = settings.method == "auto"
    drafter = _drafter(parts, settings, sampler, group)
    rest = sampler.generator, clock, group
    if settings.method == "ar" or (parts.middle is None and drafter is None):
        top = speculate("target", full, Pace(), *rest)
        return Hierarchy(settings.method, top, (top,))
    if parts.middle is None:
        top = speculate("target", full, Pace([drafter], settings.gamma2, rests=auto), *rest)
        return Hierarchy(settings.method, top, (top,))
    name = "streaming" if settings.method == "streaming" else "retrieval"
    drafters = [drafter] if drafter is not None and settings.method != "retrieval" else []
    middle = ModelVerifier(name, parts.middle, sampler)
    lower = speculate(name, middle, Pace(drafters, settings.gamma1, rests=auto), *rest)
    over = [*drafters, lower] if auto else [lower]
    top = speculate("target", full, Pace(over, settings.gamma2, rests=auto), *rest)
    return Hierarchy(settings.method, top, (top, lower))


def _drafter(parts: Parts, settings: Speculation, sampler: Sampler, group: Group) -> Drafter | None:
    if settings.draft == "none" and settings.method != "lookup":
        return None
    if parts.draft is not None and settings.method != "lookup":
        return ModelDrafter(parts.draft, sampler, group)
    return parts.lookup
