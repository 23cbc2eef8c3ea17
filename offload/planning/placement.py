"""What of a run lies where: bytes on each device and on the host, as many layers resident as fit.

A cap is never exceeded in this arithmetic; what does not fit is reported with the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..architecture.dims import Dimensions
from ..architecture.footprint import page_tokens
from ..config import Placement, Speculation
from ..hardware.rates import Hardware
from .memory import USABLE, MemoryEstimate, estimate

STAGING_BUFFERS = 2  # one fills while the other is attended to
OPEN_PAGES = 2  # of each layer that is not resident: the newest tokens, on their way to the host


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is made for.

    Args:
        shape: of the model; `model` is the name it goes by.
        tokens: prompt and answer together.
        itemsize: bytes of a weight, and of a number of the KV cache.
        draft: the draft model's shape, where Speculation names one.
        acceptance: of tokens from the retrieval level by the full cache; None for what is usual.
        draft_acceptance: of tokens from the draft by the retrieval level, likewise.
        retrieves_in_place: the retrieval cache is a list of the full cache's blocks, as with the native kernel.
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


@dataclass(frozen=True, slots=True)
class Tier:
    """A memory: its parts in bytes, and how many bytes there are to use (None: not known, so taken for enough)."""

    name: str
    parts: dict[str, int]
    limit: int | None

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def missing(self) -> int:
        """Bytes beyond the limit."""
        return 0 if self.limit is None else max(self.total - self.limit, 0)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where everything lies. The device tier is that of each GPU; the host's is for all of them together."""

    device: Tier
    host: Tier
    resident_layers: int  # whose KV stays on the device
    weight_layers: int  # whose weights do
    prefill_order: str  # "layers": layers outside, chunks inside, nothing is read back; "chunks": the other way round

    @property
    def fits(self) -> bool:
        return not self.device.missing and not self.host.missing


def place(request: PlanRequest) -> Placed:
    """The placement that keeps most on the device: weights first, which every level reads, then KV layer by layer.

    Prefill goes by layers where that leaves room for the weights, and for the KV layers that were asked for.
    """
    by_layers, by_chunks = (_place(request, order) for order in ("layers", "chunks"))
    if _everything(request, by_chunks) or not by_layers.fits:
        return by_chunks
    return by_layers if by_layers.weight_layers == by_chunks.weight_layers else by_chunks


def _everything(request: PlanRequest, placed: Placed) -> bool:
    return placed.resident_layers == placed.weight_layers == request.shape.layers


def _place(request: PlanRequest, order: str) -> Placed:
    limit, parts = device_limit(request), _Parts(request, order)
    weights, kv = _counts(request, parts, limit)
    device = Tier("device", _sorted(parts.on_device(weights, kv)), limit)
    host = Tier("host", _sorted(parts.on_host(weights, kv)), _host_limit(request, device))
    return Placed(device, host, kv, weights, order)


class _Parts:
    """The parts of a request in bytes, as they follow from how many layers' weights and KV stay on the device."""

    def __init__(self, request: PlanRequest, order: str) -> None:
        shape, size, gpus = request.shape, request.itemsize, request.hardware.gpus
        self._gpus, self._layers, self._order = gpus, shape.layers, order
        self._need = _estimate(request)
        page = page_tokens(shape, size)
        self._page = shape.layer_kv_bytes(page, size) // gpus
        self._whole_kv = -(-request.tokens // page) * self._page  # where it lies in pages
        self._hidden = request.tokens * shape.hidden * size

    def on_device(self, weights: int, kv: int) -> dict[str, int]:
        """On each device."""
        need, away = self._need, self._layers - kv
        parts = {
            "weights": need.outer_weights + weights * need.layer_weights,
            "KV cache": kv * need.layer_kv,
            "retrieval cache": need.retrieval,
            "draft model": need.draft,
            "lookup index": need.lookup,
            "activations": need.activations,
            "CUDA": need.cuda,
        }
        if away:
            parts["staging"] = (STAGING_BUFFERS + OPEN_PAGES * away) * self._page
        if weights < self._layers:
            parts["staging"] = parts.get("staging", 0) + STAGING_BUFFERS * need.layer_weights
        if self._order == "layers" and away:  # rows between two layers; the KV of one that computes and one that leaves
            parts["activations"] += 2 * self._hidden + 2 * self._whole_kv
        return parts

    def on_host(self, weights: int, kv: int) -> dict[str, int]:
        """On the host, for all devices."""
        away = {
            "weights": (self._layers - weights) * self._need.layer_weights,
            "KV cache": (self._layers - kv) * self._whole_kv,
        }
        return {name: size * self._gpus for name, size in away.items()}

    def fit(self, weights: int, kv: int, limit: int) -> bool:
        return sum(self.on_device(weights, kv).values()) <= limit

    @property
    def smallest_kv(self) -> int:
        """Resident layers that take least room: none, unless a layer's KV is smaller than what streaming it needs."""
        return 0 if self._need.layer_kv > OPEN_PAGES * self._page else self._layers


_ORDER = ("weights", "KV cache", "retrieval cache", "draft model", "lookup index", "staging", "activations", "CUDA")


def _sorted(parts: dict[str, int]) -> dict[str, int]:
    return {name: int(parts[name]) for name in _ORDER if parts.get(name)}


def device_limit(request: PlanRequest) -> int | None:
    """Bytes of each device that may be used: what there is, and no more than the cap."""
    memory, cap = request.hardware.memory, request.placement.memory
    usable = None if memory is None else int(memory * USABLE)
    return min((size for size in (usable, cap) if size is not None), default=None)


def _host_limit(request: PlanRequest, device: Tier) -> int | None:
    hardware, cap = request.hardware, request.placement.host_memory
    there = hardware.host_memory
    if there is not None and hardware.shared:
        there = max(int(there * USABLE) - device.total, 0)
    return min((size for size in (there, cap) if size is not None), default=None)


def _estimate(request: PlanRequest) -> MemoryEstimate:
    """Estimate the bytes of each device, were everything there."""
    return estimate(
        request.shape,
        request.tokens,
        request.speculation,
        device=request.hardware.device,
        itemsize=request.itemsize,
        prefill_chunk=request.prefill_chunk,
        draft=request.draft,
        in_place=request.retrieves_in_place,
        gpus=request.hardware.gpus,
    )


def _is_all_one(request: PlanRequest) -> bool:
    """On a CPU, device and host are the same memory, and there is nothing to move; but for a link that is simulated."""
    return request.hardware.shared and request.placement.link_gb_s is None


def _counts(request: PlanRequest, parts: _Parts, limit: int | None) -> tuple[int, int]:
    """Layers whose weights, and whose KV, stay on the device: all weights before any KV.

    A number of resident layers that was asked for is kept even where it does not fit: the plan then says so.
    """
    layers, asked = request.shape.layers, request.placement.resident_layers
    if request.placement.offload == "none" or _is_all_one(request):
        return layers, layers
    wanted = layers if asked is None else min(asked, layers)
    if request.hardware.shared and asked is None and request.placement.memory is None:
        wanted = 0  # a link is simulated to be seen at work
    if limit is None or parts.fit(layers, wanted, limit):
        return layers, wanted
    for kv in range(wanted, -1, -1) if asked is None else ():
        if parts.fit(layers, kv, limit):
            return layers, kv
    kv = parts.smallest_kv if asked is None else wanted
    if asked is not None and parts.fit(layers, 0, limit):
        return layers, wanted  # it is the number that does not fit, not the weights
    return next((weights for weights in range(layers - 1, 0, -1) if parts.fit(weights, kv, limit)), 0), kv
