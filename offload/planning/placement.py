"""Placement of weights and KV cache: bytes on each device and on the host, with as many layers resident as fit.

A placement never exceeds a cap silently; what does not fit is reported with the numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from ..config import EXACT
from .memory import USABLE
from .request import PlanRequest
from .tier_bytes import TierBytes

_STEP = 1024  # tokens


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
    if request.kv != EXACT:  # quantised pages are made chunk by chunk
        return by_chunks
    if _all_on_device(request, by_chunks) or not by_layers.fits:
        return by_chunks
    return by_layers if by_layers.weight_layers == by_chunks.weight_layers else by_chunks


def _all_on_device(request: PlanRequest, placed: Placed) -> bool:
    shape = request.shape
    return placed.resident_layers == shape.kv_layers and placed.weight_layers == shape.layers


def _place(request: PlanRequest, order: str) -> Placed:
    limit, sizes = device_limit(request), TierBytes(request, order)
    if request.may_use_disk:
        return _place_on_disk(request, sizes, limit, order)
    weights, kv = _resident_counts(request, sizes, limit)
    device = Tier("device", _sorted(sizes.on_device(weights, kv)), limit)
    host = Tier("host", _sorted(sizes.on_host(weights, kv)), _host_limit(request, device))
    return Placed(device, host, Tier("disk", {}, None), kv, weights, order)


def _place_on_disk(request: PlanRequest, sizes: TierBytes, limit: int | None, order: str) -> Placed:
    """Return the placement with the fewest layers' KV on disk with which the rest fits into memory."""
    layers, placement = request.shape.layers, request.placement
    most = min((n for n in (request.hardware.disk_free, placement.disk_limit) if n is not None), default=None)
    for kv in range(request.shape.kv_layers, -1, -1):
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
        return TierBytes(longer, "chunks").fit(layers, longer.shape.kv_layers, limit)

    most = next(steps for steps in (1 << n for n in range(64)) if not fits(steps))
    return _STEP * (bisect_left(range(1, most), True, key=lambda steps: not fits(steps)))


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


def _resident_counts(request: PlanRequest, sizes: TierBytes, limit: int | None) -> tuple[int, int]:
    """Return how many layers' weights, and how many layers' KV, stay on the device: all weights before any KV.

    A requested number of resident layers is kept even if it does not fit: the plan then says so.
    """
    layers, requested = request.shape.layers, request.placement.resident_layers
    every = request.shape.kv_layers
    if request.placement.offload == "none" or request.has_one_memory or request.keeps_kv:
        return layers, every
    wanted = every if requested is None else min(requested, every)
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
    if request.shape.linear is not None:
        return layers, kv  # whose weights are not streamed
    return next((weights for weights in range(layers - 1, 0, -1) if sizes.fit(weights, kv, limit)), 0), kv
