"""Placement of weights and KV cache: bytes on each device and on the host, with as many layers resident as fit.

A placement never exceeds a cap silently; what does not fit is reported with the numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace

from ..architecture.dims import Dimensions, WeightBits
from ..architecture.footprint import PAGE_GRAIN, page_tokens
from ..architecture.tier_footprint import disk_buffers, host_mean_key_bytes, host_page_bytes, staging_bytes
from ..config import Placement, Speculation
from ..hardware.rates import Hardware
from ..levels import selected_chunk, tree_nodes
from .memory import USABLE, MemoryEstimate, estimate
from .self_draft import copy_bits

_STEP = 1024  # tokens
STAGING_BUFFERS = 2  # one fills while the other is attended to


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A model, a sequence length and the hardware that a plan is made for.

    Args:
        model: the name for messages and for --model.
        shape: the model's dimensions.
        tokens: prompt and answer together.
        itemsize: bytes of a weight, and of an element of the KV cache.
        draft: the draft model's dimensions, if Speculation names one.
        acceptance: rate at which the full cache accepts the retrieval level's tokens; None for the published one.
        draft_acceptance: rate at which the retrieval level accepts the draft's tokens, likewise.
        retrieves_in_place: on a CPU, the retrieval cache is a list of the full cache's blocks (native kernel).
        has_triton: on a GPU, Triton attends; the retrieval cache is then a list of chunks where no KV is offloaded.
        weight_bits: of quantised weights; None for weights of `itemsize` bytes.
        quantize: the level to which loading rounds the weights: q4, q5, q6, q8.
        copies: with `draft="self"`, a quantised copy of the weights drafts; False: they are quantised already.
    """

    model: str
    shape: Dimensions
    tokens: int
    hardware: Hardware
    placement: Placement = field(default_factory=Placement)
    speculation: Speculation = field(default_factory=Speculation)
    prefill_chunk: int = 2048
    itemsize: int = 2
    draft: Dimensions | None = None
    acceptance: float | None = None
    draft_acceptance: float | None = None
    retrieves_in_place: bool = False
    has_triton: bool = True
    weight_bits: WeightBits | None = None
    quantize: str | None = None
    copies: bool = True

    @property
    def is_quantized(self) -> bool:
        """Return whether the target's weights are quantised."""
        return self.bits.is_quantized(self.itemsize)

    @property
    def bits(self) -> WeightBits:
        """Return the bits of the target's weights."""
        return self.weight_bits or WeightBits.of_dtype(self.itemsize)

    @property
    def copy_bits(self) -> WeightBits | None:
        """Return the bits of the weights of the quantised copy that drafts, at most; None if there is none."""
        return copy_bits(self.shape, self.speculation) if self.copies else None

    def in_place(self, offloaded: int) -> bool:
        """Return whether the retrieval cache copies nothing where so many layers' KV is in host memory."""
        return not offloaded and (self.retrieves_in_place if self.hardware.device == "cpu" else self.has_triton)

    @property
    def has_one_memory(self) -> bool:
        """Return whether device and host are the same memory, with nothing to copy: a CPU without a simulated link."""
        return self.hardware.shared and self.placement.link_gb_s is None

    @property
    def may_use_disk(self) -> bool:
        """Return whether KV for which memory is too small may lie on disk."""
        return self.has_one_memory and self.placement.disk is not None


@dataclass(frozen=True, slots=True)
class Tier:
    """A memory: the bytes of each part in it, and its usable bytes (None: unknown, and taken as enough)."""

    name: str
    parts: dict[str, int]
    limit: int | None

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def missing(self) -> int:
        """Return the bytes beyond the limit."""
        return 0 if self.limit is None else max(self.total - self.limit, 0)


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement. The device tier is that of each GPU; the host tier is shared by all of them.

    With a disk, the host tier has the KV cache that is in memory, and the disk tier the rest.
    """

    device: Tier
    host: Tier
    disk: Tier
    resident_layers: int  # whose KV stays on the device
    weight_layers: int  # whose weights stay on the device
    prefill_order: str  # "layers": loop over layers, then chunks, and no KV is read back; "chunks": chunks, then layers

    @property
    def fits(self) -> bool:
        return not self.device.missing and not self.host.missing and not self.disk.missing

    @property
    def uses_disk(self) -> bool:
        """Return whether KV that is not resident lies on disk."""
        return bool(self.disk.parts)


def place(request: PlanRequest) -> Placed:
    """Return the placement with most on the device: weights first, which every level reads, then KV layer by layer.

    Prefill runs in layer order if that leaves room for the weights and for the requested KV layers.
    """
    by_layers, by_chunks = (_place(request, order) for order in ("layers", "chunks"))
    if _all_on_device(request, by_chunks) or not by_layers.fits:
        return by_chunks
    return by_layers if by_layers.weight_layers == by_chunks.weight_layers else by_chunks


def _all_on_device(request: PlanRequest, placed: Placed) -> bool:
    return placed.resident_layers == placed.weight_layers == request.shape.layers


def _place(request: PlanRequest, order: str) -> Placed:
    limit, sizes = device_limit(request), _Sizes(request, order)
    if request.may_use_disk:
        return _place_on_disk(request, sizes, limit, order)
    weights, kv = _resident_counts(request, sizes, limit)
    device = Tier("device", _sorted(sizes.on_device(weights, kv)), limit)
    host = Tier("host", _sorted(sizes.on_host(weights, kv)), _host_limit(request, device))
    return Placed(device, host, Tier("disk", {}, None), kv, weights, order)


def _place_on_disk(request: PlanRequest, sizes: _Sizes, limit: int | None, order: str) -> Placed:
    """Return the placement with the fewest layers' KV on disk with which the rest fits into memory."""
    layers, placement = request.shape.layers, request.placement
    most = min((n for n in (request.hardware.disk_free, placement.disk_limit) if n is not None), default=None)
    for kv in range(layers, -1, -1):
        in_memory, on_disk = sizes.on_device(layers, kv), sizes.on_host(layers, kv)
        kept = {name: in_memory.pop(name) for name in ("KV cache", "staging")}
        device = Tier("device", _sorted(in_memory), limit)
        room = None if limit is None else max(limit - device.total, 0)
        room = min((size for size in (room, placement.host_memory) if size is not None), default=None)
        host = Tier("host", _sorted(kept), room)
        placed = Placed(device, host, Tier("disk", _sorted(on_disk), most), kv, layers, order)
        if not (device.missing or host.missing):
            break
    return placed


def resident_tokens(request: PlanRequest) -> int | None:
    """Return how many tokens fit, in thousands of 1,024, while all weights and the whole KV cache are on the device.

    It may be more than the model's context. None where the device's memory is not known.
    """
    limit, layers = device_limit(request), request.shape.layers
    if limit is None:
        return None

    def fits(steps: int) -> bool:
        longer = replace(request, tokens=steps * _STEP)
        return _Sizes(longer, "chunks").fit(layers, layers, limit)

    most = next(steps for steps in (1 << n for n in range(64)) if not fits(steps))
    return _STEP * (bisect_left(range(1, most), True, key=lambda steps: not fits(steps)))


class _Sizes:
    """The bytes of a request's parts, for given numbers of layers whose weights and KV stay on the device."""

    def __init__(self, request: PlanRequest, order: str) -> None:
        size, gpus = request.itemsize, request.hardware.gpus
        self._request, self._gpus, self._layers, self._order = request, gpus, request.shape.layers, order
        share = request.shape.share(gpus)
        page = page_tokens(share, size)
        self._share, self._page = share, page
        self._needs: dict[int, MemoryEstimate] = {}

    def _need(self, kv: int) -> MemoryEstimate:
        """Return the estimate for so many layers whose KV stays on the device."""
        if kv not in self._needs:
            self._needs[kv] = _estimate(self._request, self._layers - kv, self._order == "layers")
        return self._needs[kv]

    def on_device(self, weights: int, kv: int) -> dict[str, int]:
        """Return the bytes of each part on each device."""
        need, offloaded = self._need(kv), self._layers - kv
        parts = {
            "weights": need.outer_weights + weights * need.layer_weights,
            "KV cache": kv * need.layer_kv,
            "retrieval cache": need.retrieval,
            "draft model": need.draft,
            "quantised copy": need.copy,
            "lookup index": need.lookup,
            "staging": self._staging(offloaded) if offloaded else 0,
            "activations": need.activations,
            "CUDA": need.cuda,
        }
        if weights < self._layers:
            parts["staging"] += STAGING_BUFFERS * need.layer_weights
        return parts

    def on_host(self, weights: int, kv: int) -> dict[str, int]:
        """Return the bytes of each part on the host, for all devices."""
        request, offloaded, page, size = self._request, self._layers - kv, self._page, self._request.itemsize
        need, positions = self._need(kv), request.tokens + tree_nodes(request.speculation)
        parts = {
            "weights": (self._layers - weights) * need.layer_weights,
            "KV cache": host_page_bytes(self._share, offloaded, positions, page, size),
        }
        if need.retrieval and not request.hardware.shared:
            chunk = selected_chunk(request.speculation, PAGE_GRAIN, page, request.tokens)
            parts["mean keys"] = host_mean_key_bytes(self._share, offloaded, request.tokens, chunk, page, size)
        return {name: each * self._gpus for name, each in parts.items()}

    def _staging(self, offloaded: int) -> int:
        buffers, size = STAGING_BUFFERS, self._request.itemsize
        if self._request.may_use_disk:
            buffers = disk_buffers(self._share.layer_kv_bytes(self._page, size))
        return staging_bytes(self._share, offloaded, buffers, self._page, size)

    def fit(self, weights: int, kv: int, limit: int) -> bool:
        """Return whether the device's parts fit into `limit` bytes."""
        return sum(self.on_device(weights, kv).values()) <= limit

    @property
    def smallest_kv(self) -> int:
        """Return the number of resident layers that takes least memory: 0, unless streaming takes more."""
        return 0 if self._need(0).layer_kv > self._staging(2) - self._staging(1) else self._layers


_ORDER = (
    "weights",
    "KV cache",
    "mean keys",
    "retrieval cache",
    "draft model",
    "quantised copy",
    "lookup index",
    "staging",
)
_ORDER += ("activations", "CUDA")


def _sorted(parts: dict[str, int]) -> dict[str, int]:
    return {name: int(parts[name]) for name in _ORDER if parts.get(name)}


def device_limit(request: PlanRequest) -> int | None:
    """Return the usable bytes of each device: its memory, and no more than the cap."""
    memory, cap = request.hardware.memory, request.placement.memory
    usable = None if memory is None else int(memory * USABLE)
    return min((size for size in (usable, cap) if size is not None), default=None)


def _host_limit(request: PlanRequest, device: Tier) -> int | None:
    hardware, cap = request.hardware, request.placement.host_memory
    free = hardware.host_memory
    if free is not None and hardware.shared:
        free = max(int(free * USABLE) - device.total, 0)
    return min((size for size in (free, cap) if size is not None), default=None)


def _estimate(request: PlanRequest, offloaded: int, by_layers: bool) -> MemoryEstimate:
    """Return the memory estimate of each device, with so many layers whose KV is in host memory."""
    return estimate(
        request.shape,
        request.tokens,
        request.speculation,
        device=request.hardware.device,
        itemsize=request.itemsize,
        prefill_chunk=request.prefill_chunk,
        draft=request.draft,
        in_place=request.in_place(offloaded),
        weight_bits=request.bits,
        copy_bits=request.copy_bits,
        gpus=request.hardware.gpus,
        offloaded=offloaded,
        by_layers=by_layers,
    )


def _resident_counts(request: PlanRequest, sizes: _Sizes, limit: int | None) -> tuple[int, int]:
    """Return how many layers' weights, and how many layers' KV, stay on the device: all weights before any KV.

    A requested number of resident layers is kept even if it does not fit: the plan then says so.
    """
    layers, requested = request.shape.layers, request.placement.resident_layers
    if request.placement.offload == "none" or request.has_one_memory:
        return layers, layers
    wanted = layers if requested is None else min(requested, layers)
    if request.hardware.shared and requested is None and request.placement.memory is None:
        wanted = 0  # whoever simulates a link wants to see it used
    if limit is None or sizes.fit(layers, wanted, limit):
        return layers, wanted
    for kv in range(wanted, -1, -1) if requested is None else ():
        if sizes.fit(layers, kv, limit):
            return layers, kv
    kv = sizes.smallest_kv if requested is None else wanted
    if requested is not None and sizes.fit(layers, 0, limit):
        return layers, wanted  # the requested KV does not fit, but the weights do
    return next((weights for weights in range(layers - 1, 0, -1) if sizes.fit(weights, kv, limit)), 0), kv
