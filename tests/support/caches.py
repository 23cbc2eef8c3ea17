"""Every KV cache with its expected attention, for the contract tests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from offload.architecture.rope import Rope
from offload.caches.block_table import TableCache
from offload.caches.chunk_table import ChunkTableCache
from offload.caches.evicting import SinkCache
from offload.caches.full import FullCache
from offload.caches.h2o import H2OCache
from offload.caches.plane import PlaneCache
from offload.caches.protocol import KVCache
from offload.caches.retrieval import CopiedCache
from offload.caches.selection import RecencySelector, Refresh, RetrievalSelector
from offload.caches.streaming_llm import StreamingCache
from offload.memory.tree_attention import Tree, tree_of
from offload.settings.config import Speculation
from tests.support.offloading import CPU, native_kernel
from tests.support.stores import (
    CAPACITY,
    CHUNK,
    PACKED_TIERS,
    PAGE,
    SOME_STORES,
    STORES,
    close,
    definition,
    new_rope,
    new_store,
    projected,
    tiny_shape,
)

PROMPT = [(11 * position) % 249 for position in range(150)]  # in the full cache that a cache selects from
SINK, TAIL, BUDGET = 4, 32, 4 * CHUNK
BORDERS = (PAGE // 2, 2 * PAGE, 3 * PAGE, 5 * PAGE, 6 * PAGE)  # of blocks and chunks, too: these are 16 tokens
WINDOW, INFLIGHT = 24, 12  # of the StreamingLLM cache
APPROXIMATE = {"StreamingLLM for a target": SinkCache, "H2O": H2OCache}
SELECTED = [
    *(f"{which} of {store}" for which in ("retrieval of everything", "recent chunks") for store in SOME_STORES),
    *("block table of everything", "block table of recent chunks", "chunk table of recent chunks"),
]
CACHES = [*(f"full on {name}" for name in STORES), *SELECTED, *APPROXIMATE, "StreamingLLM"]
TABLES = {
    "block table": TableCache,
    "chunk table": ChunkTableCache,
    "plane": PlaneCache,
}


@dataclass
class Subject:
    """A cache under test. `ids` are its committed tokens; the first `fixed` cannot be rolled back."""

    cache: KVCache
    rope: Rope
    dtype: torch.dtype
    ids: list[int]
    fixed: int
    passes: tuple[int, ...]  # tokens of consecutive passes, which all fit behind `ids`
    too_many: int  # tokens that do not fit in one pass
    refusal: str  # the message for `too_many`
    window: int | None = None  # of StreamingLLM
    chunks: range | None = None  # selected chunks besides the sink, before the tail; None: everything
    rounding: float = 0.0  # of attention to quantised keys and values

    def visible(self, start: int, end: int) -> list[int]:
        """Return the indices that the last token of a pass attends to."""
        if self.window is not None:
            return [*range(min(SINK, start)), *range(max(min(SINK, start), start - self.window), end)]
        if self.chunks is not None:
            return [*range(CHUNK), *range(self.chunks.start * CHUNK, end)]
        return list(range(end))

    def border_below(self, length: int) -> int | None:
        """Return the next shorter length that is next to a border; of a cache that forgets any. None at the end."""
        at_borders = range(length) if self.window else (x + d for x in BORDERS for d in (-1, 0, 1) if x + d < length)
        return max((x for x in at_borders if x >= self.fixed), default=None)

    def attend(self, new: list[int], layers: int | None = None, tree: Tree | None = None) -> torch.Tensor:
        """Begin a pass and run its first layers; return `[layers, tokens, heads, head_dim]`."""
        self.cache.begin(len(new), tree)
        layers = tiny_shape().layers if layers is None else layers
        found = [self.cache.attend(i, *projected(new, i, self.dtype)).clone() for i in range(layers)]
        return torch.stack(found) if found else torch.empty(0)

    def grow(self, new: list[int], parents: tuple[int, ...]) -> torch.Tensor:
        """Run the last tokens of a tree, which stay in flight."""
        found = self.attend(new, tree=tree_of(parents))
        self.cache.hold()
        return found

    def keep(self, ids: list[int], path: list[int]) -> None:
        """Commit a path of the tree with tokens `ids`."""
        self.cache.commit(path)
        self.ids = [*self.ids, *(ids[index] for index in path)]

    def run(self, new: list[int]) -> torch.Tensor:
        found = self.attend(new)
        self.cache.commit()
        self.ids = [*self.ids, *new]
        return found

    def truncate(self, length: int) -> int:
        left = self.cache.truncate(length)
        self.ids = self.ids[:left]
        return left

    def is_close(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        """Compare up to rounding."""
        return close(found, expected) or bool((found - expected).abs().max() <= self.rounding)

    def expected(self, new: list[int]) -> torch.Tensor:
        """Return the attention of a pass over these tokens by its definition, in fp64."""
        ids, start = [*self.ids, *new], len(self.ids)
        seen = self.visible(start, len(ids))
        positions = list(range(len(seen))) if self.window is not None else seen
        layers = range(tiny_shape().layers)
        return torch.stack([definition(ids, start, i, self.rope, self.dtype, seen, positions) for i in layers])


def new_subject(name: str, dtype=torch.float32) -> Subject:
    """Make a cache of one of the kinds in `CACHES`, ready for its first pass."""
    rope = new_rope(dtype)
    if name == "StreamingLLM":
        cache = StreamingCache(tiny_shape(), rope, SINK, WINDOW, INFLIGHT, dtype, CPU)
        return Subject(
            cache, rope, dtype, [], 0, (1, 12, 3, 12, 1, 7, 12, 12, 5, 12, 12), INFLIGHT + 1, "at once", WINDOW
        )
    if name in APPROXIMATE:
        full = FullCache(new_store("plain", dtype), rope, CAPACITY)
        # Room for everything: what is left out is tested in test_evicting.
        settings = Speculation(method="ar", approximate="h2o", sink=2, window=5, budget=CAPACITY - 70, chunk=CHUNK)
        return Subject(APPROXIMATE[name](full, settings), rope, dtype, [], 0, (1, 40, 3, 20), CAPACITY + 1, "at once")
    if name.startswith("full on "):
        cache = FullCache(new_store(name.removeprefix("full on "), dtype), rope, CAPACITY)
        return Subject(cache, rope, dtype, [], 0, (1, 40, 3, 70, 1, 5, 80), CAPACITY + 1, "in a cache of")
    return _selected(name, rope, dtype)


def _selected(name: str, rope: Rope, dtype: torch.dtype) -> Subject:
    """Make a cache that selects from a full cache of the prompt, and continues as in drafting."""
    table = TABLES.get(name.split(" of ")[0])
    is_chunks = table is ChunkTableCache
    if table and not is_chunks and native_kernel() is None:
        pytest.skip("there is no native kernel here")
    stores = {ChunkTableCache: "plain", None: name.split(" of ")[-1]}
    store = PACKED_TIERS[2] if table is PlaneCache else stores.get(table, "blocks")
    full = FullCache(new_store(store, dtype), rope, CAPACITY)
    prompt = Subject(full, rope, dtype, [], 0, (), 0, "")
    everything = "everything" in name
    selector = (RetrievalSelector if everything else RecencySelector)(SINK, CHUNK)
    budget = CAPACITY if everything else BUDGET
    cache = (table or CopiedCache)(full, selector, Refresh(None), budget, CHUNK, TAIL)
    for part in (PROMPT[:100], PROMPT[100:140], PROMPT[140:]):  # the last pass packs a run
        prompt.run(part)
    cache.adopt()
    whole = (len(PROMPT) - 1) // CHUNK  # chunks that end before the newest token
    chunks = None if everything else range(whole - (BUDGET // CHUNK - 1), whole)
    passes, too_many = (1, 5, 1, 12, 3), TAIL + 2 * CHUNK + 1
    rounding = 5e-2 if table is PlaneCache else 0.0
    limits = passes, too_many, "longer than the tail", None, chunks, rounding
    return Subject(cache, rope, dtype, list(PROMPT), len(PROMPT), *limits)
