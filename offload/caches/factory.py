"""Make the caches of drafters: the class of a selected cache that a kernel serves over the store of a full one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..architecture.kv_formats import BLOCK
from ..kernels import triton
from ..memory.block_store import BlockStore
from ..memory.plain_store import PlainStore
from ..memory.quantized_store import QuantizedStore
from ..memory.store import Store
from ..settings.config import Speculation
from ..settings.kv_formats import PLANE_KV
from ..settings.method_sizes import budget_of, draft_chunk, middle_kind, selected_chunk, tail_tokens
from ..settings.methods import MIDDLES
from .block_table import TableCache
from .chunk_table import ChunkTableCache
from .full import FullCache
from .plane import PlaneCache
from .retrieval import CopiedCache
from .selected import SelectedCache
from .selection import Refresh
from .streaming_llm import StreamingCache

if TYPE_CHECKING:
    from ..model.decoder import Model


def draft_cache(model: Model, settings: Speculation) -> StreamingCache:
    """Return an empty StreamingLLM cache for a draft model."""
    chunk = draft_chunk(settings)
    length = settings.sink + settings.window + chunk
    sizes = settings.sink, settings.window, chunk, model.dtype, model.device
    return StreamingCache(model.shape, model.rope(length), *sizes, model.sliding_rope(length), model.new_states())


def selected_cache(full: FullCache, settings: Speculation, middle: str | None = None) -> SelectedCache:
    """Return the cache of a middle level over a full one; its chunks are multiples of the store's least one.

    `middle` is one of methods.MIDDLES; without it, the one of the settings.
    """
    store = full.store
    # On a GPU also pages that are not the kernel's blocks are selected in their size, which the plan counts on.
    is_paged = store.page_tokens and store.device.type != "cpu"
    name = middle or middle_kind(settings)
    assert name is not None, "there is a middle level"
    chosen = MIDDLES[name]
    least = max(store.least_chunk, BLOCK if is_paged else 1)
    chunk = selected_chunk(settings, least, store.page_tokens, full.capacity)
    selector = chosen.load()(settings.sink, chunk)
    if chosen.scores:
        store.keep_mean_keys(chunk)
    budget = max(full.capacity if chosen.whole else budget_of(settings, full.capacity), 2 * chunk)
    sizes = budget, chunk, tail_tokens(settings)
    return _selected_class(store, chosen.whole)(full, selector, Refresh(settings.rebuild_every), *sizes)


def _selected_class(store: Store, whole: str | None = None) -> type[SelectedCache]:
    """Return the class of the retrieval cache over a full cache's store: one without a copy, where a kernel can."""
    if whole == PLANE_KV.name:
        return PlaneCache
    if isinstance(store, BlockStore | QuantizedStore) and not store.page_tokens:  # not over tiers
        return TableCache
    if not isinstance(store, PlainStore) or store.shape.caps_scores or store.shape.has_sinks:
        return CopiedCache
    return ChunkTableCache if triton.serves(store.layer(0)[0][:1]) else CopiedCache
