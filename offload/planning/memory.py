"""Memory estimates, for plans and for the check before loading. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..architecture.dims import Dimensions
from ..architecture.footprint import (
    PAGE_GRAIN,
    Where,
    activation_bytes,
    dequantized_bytes,
    page_tokens,
    retrieval_bytes,
    rope_bytes,
    selection_bytes,
)
from ..architecture.head_shape import HeadDimensions, drafter_bits
from ..architecture.kv_formats import quantized_layer_bytes
from ..architecture.parameters import WeightBits
from ..architecture.tier_footprint import mean_key_bytes, paged_prefill_bytes, plain_prefill_bytes, state_bytes
from ..errors import OutOfMemory
from ..settings.config import Speculation
from ..settings.kv_formats import BF16, KV_FORMATS, PACKED_KV, PLAIN_KV
from ..settings.method_sizes import (
    EVICT_EVERY,
    SPARE_ROWS,
    draft_capacity,
    draft_chunk,
    drafter_kind,
    forgets,
    has_draft_model,
    has_middle,
    selected_chunk,
    tree_nodes,
)
from ..settings.methods import LOOKUP
from ..units import GIB, counted, size_text

CUDA_BYTES = GIB // 2  # the driver's context and the libraries' workspaces
# A graph of a thousand kernels: parameters and work queues in the driver, and the results that it keeps. A guess; no
# measurement stands behind it.
GRAPH_BYTES = 12 * 2**20
GRAPHS = 7  # of each level: passes of 1, 2, 4, ... 64 rows
LOOKUP_BYTES = 175  # a token of the lookup index (speculation/drafters/ngram.py), measured on text and on random tokens
USABLE = 0.97  # of a memory: the rest is lost to fragmentation in the allocator


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes that a run takes on each device if all weights and the whole KV cache are there."""

    tokens: int
    layers: int
    outer_weights: int  # embeddings and output head
    layer_weights: int  # per layer
    layer_kv: int  # per layer, for all tokens and those of a tree
    activations: int
    retrieval: int  # selected KV and mean keys
    draft: int  # a draft model's weights, cache and activations
    cuda: int
    lookup: int  # the n-gram lookup index, which lies in host memory: 0 for a GPU
    draft_cache: int = 0  # of `draft`: the cache, which every sequence has
    rope: int = 0  # of `activations`: the RoPE tables, likewise
    kv_layers: int = 0  # of `layers`: those that have keys and values of all tokens
    fixed_kv: int = 0  # of the others: rings of layers with a window, and states of those with linear attention
    host_weights: int = 0  # beside a GPU: of the layers' own embeddings

    @property
    def weights(self) -> int:
        return self.outer_weights + self.layers * self.layer_weights

    @property
    def kv(self) -> int:
        return self.kv_layers * self.layer_kv + self.fixed_kv

    @property
    def parts(self) -> dict[str, int]:
        """Return the bytes of each part, by its name for people."""
        return {
            "weights": self.weights,
            f"KV cache of {counted(self.tokens, 'token')}": self.kv,
            "retrieval cache": self.retrieval,
            "draft model": self.draft,
            "lookup index": self.lookup,
            "CUDA": self.cuda,
            "activations": self.activations,
        }

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def for_sequences(self, count: int, shared: int = 0) -> MemoryEstimate:
        """Return the estimate for `count` such sequences together, of which the first `shared` tokens are the same.

        Weights, and the activations of a prefill chunk, are there once; so are the shared tokens' keys and values.
        """
        own = self.tokens - min(shared, self.tokens)
        return replace(
            self,
            fixed_kv=count * self.fixed_kv,
            layer_kv=self.layer_kv + (count - 1) * self.layer_kv * own // self.tokens,
            retrieval=count * self.retrieval,
            lookup=count * self.lookup,
            draft=self.draft + (count - 1) * self.draft_cache,
            activations=self.activations + (count - 1) * self.rope,
        )


def estimate(
    shape: Dimensions,
    tokens: int,
    settings: Speculation,
    *,
    device: str,
    itemsize: int,
    prefill_chunk: int,
    draft: Dimensions | None = None,
    in_place: bool = False,
    gpus: int = 1,
    offloaded: int = 0,
    by_layers: bool = False,
    weight_bits: WeightBits | None = None,
    kv: str = BF16,
) -> MemoryEstimate:
    """Estimate the memory for a sequence of `tokens`, prompt and answer together.

    Args:
        device: "cpu" or "cuda".
        itemsize: bytes of a weight, and of an element of the KV cache.
        prefill_chunk: tokens in one prefill pass.
        draft: the draft model's dimensions, counted if the method uses one.
        in_place: the retrieval cache is a list of the full cache's blocks or chunks, not a copy.
        gpus: devices that share the model; each has all of the draft model.
        offloaded: layers whose KV is in host memory; `layer_kv` is nevertheless what it takes on a device.
        by_layers: prefill runs layer by layer.
        weight_bits: of quantised weights; None for weights of `itemsize` bytes.
        kv: the format of the full cache's keys and values.
    """
    on_cpu, bits = device == "cpu", weight_bits or WeightBits.of_dtype(itemsize)
    if KV_FORMATS[kv] is PACKED_KV and (on_cpu or offloaded):
        kv = BF16  # beside those over tiers, none are packed in the device's own memory
    share, where = shape.share(gpus), Where(device, offloaded, in_place, kv)
    retrieval, selection = _middle_bytes(share, settings, tokens, itemsize, where)
    host_weights = 0 if on_cpu else shape.host_bytes(bits)
    prefill = _prefill_bytes(share, settings, tokens, prefill_chunk, itemsize, by_layers, where)
    dequantized = dequantized_bytes(share) if bits.is_quantized(itemsize) and not on_cpu else 0
    return MemoryEstimate(
        tokens=tokens,
        layers=shape.layers,
        outer_weights=(shape.outer_bytes(bits) - host_weights) // gpus,
        layer_weights=shape.layer_bytes(bits) // gpus,
        layer_kv=_layer_kv(shape, settings, tokens, prefill_chunk, itemsize, kv) // gpus,
        activations=activation_bytes(share, tokens, prefill_chunk, itemsize, on_cpu, prefill, selection) + dequantized,
        retrieval=retrieval,
        draft=_draft_bytes(draft, settings, bits, itemsize, on_cpu),
        cuda=0
        if on_cpu
        else CUDA_BYTES + _graph_bytes(settings, tokens, gpus, not offloaded and not KV_FORMATS[kv].lossy),
        lookup=tokens * LOOKUP_BYTES if on_cpu and drafter_kind(settings) == LOOKUP else 0,
        draft_cache=_draft_cache_bytes(draft, settings, itemsize),
        rope=rope_bytes(share, tokens, itemsize),
        kv_layers=shape.kv_layers,
        host_weights=host_weights,
        fixed_kv=shape.fixed_bytes(tokens, itemsize, tree_nodes(settings), prefill_chunk) // gpus,
    )


def _middle_bytes(
    share: Dimensions, settings: Speculation, tokens: int, itemsize: int, where: Where
) -> tuple[int, int]:
    """Return the bytes of the retrieval cache, and those that a selection takes; arguments as of `estimate`."""
    if not has_middle(settings, tokens):
        return 0, 0
    cache = retrieval_bytes(share.growing, settings, tokens, itemsize, where)
    cache += share.fixed_bytes(tokens, itemsize, tree_nodes(settings))  # copies, with the tokens drafted
    return cache, selection_bytes(share.growing, settings, tokens, where)


def _prefill_bytes(
    shape: Dimensions, settings: Speculation, tokens: int, chunk: int, itemsize: int, by_layers: bool, where: Where
) -> int:
    """Return the bytes of the buffers that exist while a prompt is read; arguments as of `estimate`."""
    kv, on_cpu, rows = KV_FORMATS[where.kv], where.device == "cpu", min(chunk, tokens)
    if kv is PACKED_KV and not on_cpu:  # those of a layer, unpacked for a chunk of a prompt
        return shape.layer_kv_bytes(tokens, itemsize)
    if kv is not PLAIN_KV and not on_cpu:
        return state_bytes(shape, rows)
    hidden = tokens * shape.hidden * itemsize if by_layers else 0  # of all tokens between two layers
    if not where.offloaded or kv.lossy:  # of lossy ones, pages that a pass writes to are among the staging buffers
        return hidden
    page = page_tokens(shape, itemsize)
    if not by_layers:
        return paged_prefill_bytes(shape, 1, 1 + rows, page, itemsize) if rows > page else 0
    if on_cpu:
        return hidden + paged_prefill_bytes(shape, 0, tokens, page, itemsize)
    means = 0
    if has_middle(settings, tokens):
        means = mean_key_bytes(shape, tokens, selected_chunk(settings, PAGE_GRAIN, page, tokens), itemsize)
    return hidden + means + plain_prefill_bytes(shape, tokens, rows, page, itemsize)


def _graph_bytes(settings: Speculation, tokens: int, gpus: int, full: bool) -> int:
    """Return the bytes of recorded CUDA graphs, on a single GPU; `full`: those of the full pass too."""
    levels = full + has_middle(settings, tokens) + has_draft_model(settings)
    return levels * GRAPHS * GRAPH_BYTES if gpus == 1 else 0


def _layer_kv(shape: Dimensions, settings: Speculation, tokens: int, chunk: int, itemsize: int, kv: str) -> int:
    """Return the bytes of the full cache, or of one that forgets, in one layer; of `tokens` as in `stored_tokens`."""
    tokens += tree_nodes(settings)
    if KV_FORMATS[kv] is PLAIN_KV:
        return shape.layer_kv_bytes(tokens, itemsize)
    exact = 0
    if forgets(settings):
        exact, chunk = tokens // 2, min(chunk, EVICT_EVERY)  # those before RoPE
    return shape.layer_kv_bytes(exact, itemsize) + quantized_layer_bytes(shape, kv, tokens - exact, chunk, itemsize)


def _draft_bytes(
    draft: Dimensions | None, settings: Speculation, target: WeightBits, itemsize: int, on_cpu: bool
) -> int:
    """Return the bytes of a draft model's weights, cache and activations; 0 if the method uses none."""
    if draft is None or not has_draft_model(settings):
        return 0
    room = draft_capacity(settings)
    activations = activation_bytes(draft, room, draft_chunk(settings), itemsize, copies=on_cpu)
    bits = drafter_bits(draft, target, itemsize)
    weights = draft.layers * draft.layer_bytes(bits) + draft.outer_bytes(bits)
    return weights + _draft_cache_bytes(draft, settings, itemsize) + activations


def _draft_cache_bytes(draft: Dimensions | None, settings: Speculation, itemsize: int) -> int:
    """Return the bytes of a draft model's cache, with the rows that a head reads; 0 if the method uses none."""
    if draft is None or not has_draft_model(settings):
        return 0
    rows = (settings.window + SPARE_ROWS) * draft.row * itemsize if isinstance(draft, HeadDimensions) else 0
    return draft.kv_bytes(draft_capacity(settings), itemsize) + draft.state_bytes(itemsize) + rows


def check_fit(need: MemoryEstimate, free: int, may_pack: bool = False) -> None:
    """Raise OutOfMemory with the bytes of each part if `need` exceeds `free` bytes.

    `may_pack`: whether keys and values are not packed, and could be.
    """
    if need.total <= free:
        return
    listed = ", ".join(f"{name} {size_text(size)}" for name, size in need.parts.items() if size)
    lighter = "--kv packed, which loses nothing, " if may_pack else ""
    raise OutOfMemory(
        f"not enough memory: about {size_text(need.total)} needed ({listed}), {size_text(free)} may be used",
        f"use {lighter}a shorter prompt, fewer --max-new-tokens, a smaller --set prefill_chunk=N, --dtype bfloat16, "
        "--disk with a folder on a fast drive or a smaller model",
    )
