"""The memory plan: the bytes of each part of a run on the device, on the host and on disk. Imports no torch.

Tests hold it against what a run allocates.
"""

from dataclasses import dataclass

from ..architecture.head_shape import HeadDimensions, drafter_bits
from ..architecture.kv_formats import BLOCK, bf16_layer_bytes, format_bytes, quantized_layer_bytes
from ..architecture.pages import (
    BOUNCE_BUFFERS,
    DEQUANTIZED_BYTES,
    DISK_READ_BYTES,
    GATHERED_BYTES,
    LARGEST_PAGE,
    LEAST_PAGE,
    RING_BUFFERS,
    SCORED_BYTES,
    copied_pages,
    copy_bytes_for,
    disk_buffers,
    host_mean_key_bytes,
    host_page_bytes,
    mean_key_bytes,
    open_slots,
    packing_bytes,
    page_tokens,
    prefill_bytes,
    staging_bytes,
)
from ..errors import OutOfMemory
from ..settings.kv_formats import BF16, KV_FORMATS, PACKED_KV, PLAIN_KV, PLANE_KV
from ..settings.method_sizes import (
    KEPT_QUERIES,
    PADDING,
    SPARE_ROWS,
    draft_capacity,
    draft_chunk,
    drafter_kind,
    forgets,
    has_draft_model,
    has_middle,
    selected_chunk,
    tail_tokens,
    tree_nodes,
    whole_format,
)
from ..settings.methods import LOOKUP
from ..units import GIB, counted, size_text
from .activations import accumulator_bytes, activation_bytes, expert_row_bytes, rope_bytes
from .inputs import PlanInputs

CUDA_BYTES = GIB // 2  # the driver's context and the libraries' workspaces
# The graphs of a level, of passes over 1, 2, 4, ... 64 rows: of each some thousand kernels' parameters and work queues
# in the driver, and the results that it keeps. A guess; no measurement stands behind it.
GRAPHS_BYTES = 7 * 12 * 2**20
LOOKUP_BYTES = 175  # a token of the lookup index (speculation/drafters/ngram.py), measured on text and on random tokens
USABLE = 0.97  # of a memory: the rest is lost to fragmentation in the allocator
STAGING_BUFFERS = 2  # of weights: one fills while the other is computed with
ARRANGED_EXPERTS = {False: 2, True: 5}  # whose bytes it takes to unpack one; quantised, its codes have a byte each


@dataclass(frozen=True, slots=True)
class Tier:
    """A memory: the bytes of each part in it, and its usable bytes (None: unknown, and taken as enough)."""

    parts: dict[str, int]
    limit: int | None = None

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def missing(self) -> int:
        """Return the bytes beyond the limit."""
        return 0 if self.limit is None else max(self.total - self.limit, 0)

    @property
    def listed(self) -> str:
        """Return the parts with their sizes, for messages."""
        return ", ".join(f"{name} {size_text(size)}" for name, size in self.parts.items())


def tier(parts: dict[str, int], limit: int | None = None) -> Tier:
    """Return a memory with the parts that take any of it."""
    return Tier({name: int(size) for name, size in parts.items() if size}, limit)


class MemoryPlan:
    """The bytes of a plan's parts, for given numbers of layers whose weights and KV stay on the device.

    In its methods `weights` and `kv` count those layers, and `away` the sparse layers with experts in host memory.

    Args:
        by_layers: whether prefill runs layer by layer.
        hosts_experts: whether experts of some layers may be in host memory.
    """

    def __init__(self, inputs: PlanInputs, by_layers: bool = False, hosts_experts: bool = False) -> None:
        shape, bits, gpus = inputs.shape, inputs.bits, inputs.hardware.gpus
        self.inputs, self._by_layers, self._hosts_experts, self._gpus = inputs, by_layers, hosts_experts, gpus
        self._share, self._on_cpu = shape.share(gpus), inputs.hardware.shared
        self._page = page_tokens(self._share, inputs.itemsize)
        self._positions = inputs.tokens + tree_nodes(inputs.speculation)
        self._rows = min(inputs.prefill_chunk, inputs.tokens)
        self._experts = shape.expert_bytes(bits) // gpus  # of a sparse layer
        self._layer_weights = shape.layer_bytes(bits) // gpus
        self._host_weights = 0 if self._on_cpu else shape.host_bytes(bits)  # beside a GPU: the layers' own embeddings
        self._outer_weights = (shape.outer_bytes(bits) - self._host_weights) // gpus
        self.sparse_layers = shape.experts.layers if shape.experts else 0

    def device(self, weights: int, kv: int, away: int = 0) -> dict[str, int]:
        """Return the bytes of each part on each device."""
        inputs, offloaded, count = self.inputs, self.inputs.shape.kv_layers - kv, self.inputs.sequences
        stored = self._stored_format(offloaded)
        parts = {
            "weights": self._outer_weights + weights * self._layer_weights,
            "experts": 0,
            "KV cache": kv * self._layer_kv(stored, offloaded)
            + count * (self._fixed_kv() + offloaded * self._kept_of_offloaded()),
            "retrieval cache": count * self._retrieval(offloaded, stored),
            "draft model": self._draft(),
            "lookup index": count * self._lookup(),
            "staging": count * self._staging(offloaded) if offloaded else 0,
            "activations": self._activations(offloaded, stored),
            "CUDA": self._cuda(offloaded, stored),
        }
        if weights < inputs.shape.layers:
            parts["staging"] += STAGING_BUFFERS * self._layer_weights
        if self._hosts_experts:
            parts["experts"] = (self.sparse_layers - away) * self._experts
            parts["weights"] -= self.sparse_layers * self._experts
            parts["staging"] += STAGING_BUFFERS * self._experts + self._arranging() if away else 0
        return parts

    def host(self, weights: int, kv: int, away: int = 0, on_disk: int = 0) -> dict[str, int]:
        """Return the bytes of each part on the host, for all devices; `on_disk` layers' pages are not there."""
        inputs, offloaded = self.inputs, self.inputs.shape.kv_layers - kv
        parts = {
            "weights": (inputs.shape.layers - weights) * self._layer_weights + self._host_weights // self._gpus,
            "experts": away * self._experts,
            "KV cache": inputs.sequences * self._host_pages(offloaded - on_disk, inputs.has_planes),
            "mean keys": 0,
            "staging": BOUNCE_BUFFERS * DISK_READ_BYTES if on_disk else 0,
            "activations": self._rows * expert_row_bytes(self._share, 4) if away else 0,
        }
        if (
            has_middle(inputs.speculation, inputs.tokens)
            and not inputs.kv_format.lossy
            and whole_format(inputs.speculation) is None
        ):
            chunk = selected_chunk(inputs.speculation, BLOCK, self._page, inputs.tokens)
            means = host_mean_key_bytes(self._share, offloaded, inputs.tokens, chunk, self._page, inputs.itemsize)
            parts["mean keys"] = inputs.sequences * means
        return {name: size * self._gpus for name, size in parts.items()}

    def disk(self, layers: int) -> dict[str, int]:
        """Return the bytes of so many layers' pages on disk, for all devices."""
        return {"KV cache": self.inputs.sequences * self._host_pages(layers) * self._gpus}

    def fits(self, weights: int, kv: int, limit: int, away: int = 0) -> bool:
        """Return whether the device's parts fit into `limit` bytes."""
        return sum(self.device(weights, kv, away).values()) <= limit

    @property
    def smallest_kv(self) -> int:
        """Return the number of resident layers that takes least memory: 0, unless streaming takes more."""
        layers, streamed = self.inputs.shape.kv_layers, self._staging(2) - self._staging(1)
        is_smaller = self._layer_kv(self._stored_format(layers), layers) > self.inputs.sequences * streamed
        return 0 if is_smaller else layers

    def _stored_format(self, offloaded: int) -> str:
        """Return the format of the layers that stay on the device: where others are offloaded, they are not packed."""
        inputs = self.inputs
        stays_plain = self._on_cpu or offloaded or (inputs.has_planes and inputs.auto_packed)
        stays_plain = stays_plain or forgets(inputs.speculation)
        return BF16 if inputs.kv_format is PACKED_KV and stays_plain else inputs.kv

    def _layer_kv(self, kv: str, offloaded: int) -> int:
        """Return the bytes of one layer's keys and values of all sequences on each device."""
        inputs, tokens = self.inputs, self._positions
        if KV_FORMATS[kv] is PLAIN_KV:
            one = inputs.shape.layer_kv_bytes(tokens, inputs.itemsize) // self._gpus
        else:
            one = quantized_layer_bytes(inputs.shape, kv, tokens, inputs.prefill_chunk, inputs.itemsize) // self._gpus
        own = inputs.tokens - (0 if offloaded else min(inputs.shared, inputs.tokens))
        return one + (inputs.sequences - 1) * one * own // inputs.tokens

    def _fixed_kv(self) -> int:
        """Return the bytes of a sequence's rings of layers with a window, and states of linear attention."""
        inputs, nodes = self.inputs, tree_nodes(self.inputs.speculation)
        return inputs.shape.fixed_bytes(inputs.tokens, inputs.itemsize, nodes, inputs.prefill_chunk) // self._gpus

    def _kept_of_offloaded(self) -> int:
        """Return the bytes of an offloaded layer that stay on the device: newest tokens and sink, or plane A."""
        inputs, pages = self.inputs, -(-self._positions // self._page)
        if inputs.has_planes:
            return pages * format_bytes(self._share, PLANE_KV.name, self._page, inputs.itemsize)
        if inputs.kv_format.lossy:
            return bf16_layer_bytes(self._share, inputs.tokens, inputs.prefill_chunk, inputs.itemsize)
        return 0

    def _host_pages(self, layers: int, in_planes: bool = False) -> int:
        inputs = self.inputs
        return host_page_bytes(
            self._share, layers, self._positions, self._page, inputs.itemsize, inputs.kv, in_planes=in_planes
        )

    def _retrieval(self, offloaded: int, kv: str) -> int:
        """Return the bytes of the selected cache, with the mean keys and queries that are kept for selections."""
        inputs, settings, shape, size = (
            self.inputs,
            self.inputs.speculation,
            self._share.full_attention,
            self.inputs.itemsize,
        )
        if not has_middle(settings, inputs.tokens):
            return 0
        chunk = chunk_of(inputs, offloaded, kv)
        chunks, slots = inputs.tokens // chunk, inputs.budget // chunk
        if inputs.in_place(offloaded):
            selected = shape.layers * shape.kv_heads * slots * 4
        else:
            selected = shape.kv_bytes(tail_tokens(settings) + chunk + PADDING, size)
            selected += shape.kv_bytes(slots * chunk, size)
        queries = shape.layers * KEPT_QUERIES * shape.heads * shape.head_dim * size
        if self._on_cpu:
            means = shape.kv_bytes(chunks, size) // 2
        else:  # in 8 bits, with a scale in fp32: see caches/chunk_scores.py
            means = offloaded * shape.kv_heads * chunks * (shape.head_dim + 4)
        copies = self._share.fixed_bytes(inputs.tokens, size, tree_nodes(settings))  # with the tokens drafted
        return selected + queries + means + copies

    def _selection(self, offloaded: int, kv: str) -> int:
        """Return the bytes that a selection takes while it runs."""
        inputs, shape = self.inputs, self._share.full_attention
        if not has_middle(inputs.speculation, inputs.tokens):
            return 0
        chunk = chunk_of(inputs, offloaded, kv)
        chunks, slots, rows = inputs.tokens // chunk, inputs.budget // chunk, shape.layers * shape.kv_heads
        if self._on_cpu:
            return rows * (8 * chunks + 16 * slots)  # scores in two precisions; the indices and scores chosen
        scoring = 3 * SCORED_BYTES + 2 * 4 * shape.kv_heads * chunks
        copies = 3 if offloaded else 1  # as they come over the link, in plain order, and all of them together
        replacing = rows * (4 * chunks + 12 * 8 * slots) + copies * GATHERED_BYTES  # booleans and integers
        return 8 * rows * slots + max(scoring, replacing)

    def _draft(self) -> int:
        """Return the bytes of a draft model's weights, activations, and a cache of each sequence; 0 without one."""
        inputs, draft, settings = self.inputs, self.inputs.draft, self.inputs.speculation
        if draft is None or not has_draft_model(settings):
            return 0
        room, bits = draft_capacity(settings), drafter_bits(draft, inputs.bits, inputs.itemsize)
        weights = draft.layers * draft.layer_bytes(bits) + draft.outer_bytes(bits)
        rows = (settings.window + SPARE_ROWS) * draft.row if isinstance(draft, HeadDimensions) else 0
        cache = draft.kv_bytes(room, inputs.itemsize) + draft.state_bytes(inputs.itemsize) + rows * inputs.itemsize
        activations = activation_bytes(draft, room, draft_chunk(settings), inputs.itemsize, copies=self._on_cpu)
        return weights + activations + inputs.sequences * cache

    def _lookup(self) -> int:
        """Return the bytes of a sequence's n-gram index, which lies in host memory: 0 beside a GPU."""
        has_index = self._on_cpu and drafter_kind(self.inputs.speculation) == LOOKUP
        return self.inputs.tokens * LOOKUP_BYTES if has_index else 0

    def _staging(self, offloaded: int) -> int:
        """Return the bytes for prefetched pages, and for the open pages of `offloaded` layers."""
        inputs, page, size = self.inputs, self._page, self.inputs.itemsize
        kv = inputs.kv if inputs.kv_format.lossy else BF16  # buffers have room for pages that cannot be packed
        page_size = format_bytes(self._share, kv, page, size)
        buffers = RING_BUFFERS * copied_pages(
            page_size, -(-self._positions // page), copy_bytes_for(inputs.hardware.link)
        )
        if inputs.placement.disk is not None:
            buffers = disk_buffers(page_size)
        staged = staging_bytes(self._share, offloaded, buffers, page, size, kv, open_slots(self._rows, page, kv))
        if inputs.kv_format is PACKED_KV and not self._on_cpu:
            staged += packing_bytes(self._share, offloaded, page)
        return staged

    def _arranging(self) -> int:
        """Return the bytes in which an expert that has arrived in the host's layout is unpacked."""
        inputs, experts = self.inputs, self.inputs.shape.experts
        if experts is None or self._on_cpu:
            return 0
        return ARRANGED_EXPERTS[inputs.is_quantized] * self._experts // experts.count

    def _activations(self, offloaded: int, kv: str) -> int:
        inputs, share = self.inputs, self._share
        prefill, selection = self._prefill(offloaded, kv), self._selection(offloaded, kv)
        size = activation_bytes(
            share, inputs.tokens, inputs.prefill_chunk, inputs.itemsize, self._on_cpu, prefill, selection
        )
        if inputs.is_quantized and not self._on_cpu:  # some outputs of the largest linear, in bf16
            size += min(DEQUANTIZED_BYTES, 2 * 2 * max(share.mlp_widths) * share.hidden)
        return size + (inputs.sequences - 1) * rope_bytes(share, inputs.tokens, inputs.itemsize)

    def _prefill(self, offloaded: int, kv: str) -> int:
        """Return the bytes of the buffers that exist while a prompt is read."""
        inputs, shape, page, size, format = self.inputs, self._share, self._page, self.inputs.itemsize, KV_FORMATS[kv]
        if format is PACKED_KV and not self._on_cpu:  # one layer's, unpacked for a chunk of a prompt
            return shape.layer_kv_bytes(inputs.tokens, size)
        if format is not PLAIN_KV and not self._on_cpu:
            return accumulator_bytes(shape, self._rows)
        hidden = inputs.tokens * shape.hidden * size if self._by_layers else 0  # of all tokens between two layers
        if not offloaded or format.lossy:  # of lossy ones, pages that a pass writes to are among the staging buffers
            return hidden
        if not self._by_layers and self._rows <= page:
            return 0
        means = 0
        if has_middle(inputs.speculation, inputs.tokens):
            chunk = selected_chunk(inputs.speculation, BLOCK, page, inputs.tokens)
            means = mean_key_bytes(shape, inputs.tokens, chunk, size)
        return hidden + means + prefill_bytes(shape, inputs.tokens, self._rows, page, size)

    def _cuda(self, offloaded: int, kv: str) -> int:
        """Return the bytes of the driver, and of recorded graphs on a single GPU."""
        inputs, settings = self.inputs, self.inputs.speculation
        if self._on_cpu:
            return 0
        records_full = not offloaded and not KV_FORMATS[kv].lossy
        levels = records_full + has_middle(settings, inputs.tokens) + has_draft_model(settings)
        return CUDA_BYTES + (levels * GRAPHS_BYTES if self._gpus == 1 else 0)


def estimate(inputs: PlanInputs) -> Tier:
    """Return the memory of each device if all weights and the whole KV cache are there."""
    return tier(MemoryPlan(inputs).device(inputs.shape.layers, inputs.shape.kv_layers))


def chunk_of(inputs: PlanInputs, offloaded: int, kv: str, in_blocks: bool = True) -> int:
    """Return how many tokens are selected together: whole blocks of the native kernel, where it attends or could.

    Of quantised keys and values they are groups. No chunk crosses the end of a page. `kv`: the format of the layers on
    the device. `in_blocks`: pages lie in the kernel's blocks.
    """
    settings = inputs.speculation
    in_table = inputs.hardware.shared and inputs.in_place(offloaded)
    grain = BLOCK if (offloaded and in_blocks) or in_table else 1
    page = LARGEST_PAGE if settings.chunk > LEAST_PAGE else LEAST_PAGE  # a page has one of the two sizes
    grain = max(grain, KV_FORMATS[kv].grain)
    return selected_chunk(settings, grain, page if offloaded else 0, inputs.tokens)


def check_fit(need: Tier, tokens: int, free: int, may_pack: bool = False) -> None:
    """Raise OutOfMemory with the bytes of each part if `need` exceeds `free` bytes.

    `may_pack`: whether keys and values are not packed, and could be.
    """
    if need.total <= free:
        return
    lighter = "--kv packed, which loses nothing, " if may_pack else ""
    raise OutOfMemory(
        f"not enough memory for {counted(tokens, 'token')}: about {size_text(need.total)} needed ({need.listed}), "
        f"{size_text(free)} may be used",
        f"use {lighter}a shorter prompt, fewer --max-new-tokens, a smaller --set prefill_chunk=N, --dtype bfloat16, "
        "--disk with a folder on a fast drive or a smaller model",
    )
