"""Placement of weights and KV cache: bytes on each device and on the host, with as many layers resident as fit.

A placement never exceeds a cap silently; what does not fit is reported with the numbers.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

from ..settings.kv_formats import BF16
from .expert_times import streamed_rows
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

    With a disk, the host tier has the KV cache that is in memory, and the disk tier the rest: that of the last
    `disk_layers`.
    """

    device: Tier
    host: Tier
    disk: Tier
    resident_layers: int  # whose KV stays on the device
    weight_layers: int  # whose weights stay on the device
    disk_layers: int  # whose KV lies on disk
    prefill_order: str  # "layers": loop over layers, then chunks, and no KV is read back; "chunks": chunks, then layers
    experts: str = "device"  # host: some are in host memory
    away_layers: int = 0  # whose experts are in host memory
    streamed_rows: int = 0  # of the least pass that copies them

    @property
    def fits(self) -> bool:
        return not self.device.missing and not self.host.missing and not self.disk.missing

    def experts_way(self, rows: int) -> str:
        """Return how experts in host memory run in a pass over `rows` rows: host, stream; device without any."""
        if self.experts == "device":
            return self.experts
        return "stream" if rows >= self.streamed_rows else "host"

    @property
    def uses_disk(self) -> bool:
        """Return whether KV that is not resident lies on disk."""
        return bool(self.disk.parts)


def place(request: PlanRequest) -> Placed:
    """Return the placement with most on the device: weights first, which every level reads, then KV layer by layer.

    Of a mixture of experts that does not fit with its KV, the experts come last: a pass reads all other weights and all
    KV, but a few experts of each layer. Prefill runs in layer order if that leaves room for the weights and for the
    requested KV layers.
    """
    return placements(request)[0]


def placements(request: PlanRequest) -> list[Placed]:
    """Return the placements to choose from by their times: those of all ways to run experts that have no room.

    If none of them fits, but experts in host memory were asked for, they are those that do not.
    """
    placement = request.placement
    ways, asked = request.expert_ways, placement.experts != "auto"
    if not asked and _has_room(request):
        ways = ()
    found = [_in_best_order(request, way) for way in ways]
    fitting = [placed for placed in found if placed.fits]
    return fitting or (found if asked else []) or [_in_best_order(request, "device")]


def _has_room(request: PlanRequest) -> bool:
    """Return whether all weights fit the device, with the KV of as many layers as shall be there."""
    limit = device_limit(request)
    sizes = TierBytes(request, "chunks")
    return limit is None or sizes.fit(request.shape.layers, _wanted_kv(request), limit)


def _in_best_order(request: PlanRequest, way: str) -> Placed:
    shape, by_chunks = request.shape, _place(request, "chunks", way)
    # Chunk after chunk of a prompt then copies nothing to the device again.
    is_resident = (by_chunks.resident_layers, by_chunks.weight_layers) == (shape.kv_layers, shape.layers)
    reads_nothing_back = is_resident and by_chunks.experts != "host"
    if reads_nothing_back or request.kv_format.lossy or not shape.runs_by_layers:  # lossy pages are made by chunks
        return by_chunks
    by_layers = _place(request, "layers", way)
    return by_layers if by_layers.fits and by_layers.weight_layers == by_chunks.weight_layers else by_chunks


def _place(request: PlanRequest, order: str, way: str = "device") -> Placed:
    limit, sizes = device_limit(request), TierBytes(request, order, way)
    if request.placement.disk is not None and request.has_one_memory:
        return _place_on_disk(request, sizes, limit, order)
    counts = _resident_counts(request, sizes, limit) if way == "device" else _counts_of_experts(request, sizes, limit)
    weights, kv, away = counts
    device = Tier("device", _sorted(sizes.on_device(*counts)), limit)
    room = _host_limit(request, device)
    least = range(request.shape.kv_layers - kv + 1 if request.placement.disk is not None else 1)
    on_disk = next((n for n in least if room is None or sum(sizes.on_host(*counts, n).values()) <= room), least[-1])
    host = Tier("host", _sorted(sizes.on_host(*counts, on_disk)), room)
    disk = Tier("disk", _sorted(sizes.on_disk(on_disk)), _disk_limit(request)) if on_disk else Tier("disk", {}, None)
    rows = streamed_rows(request) if away else 0
    return Placed(device, host, disk, kv, weights, on_disk, order, way if away else "device", away, rows)


def _disk_limit(request: PlanRequest) -> int | None:
    """Return the bytes that may be used on disk; None if that is not known."""
    return _least(request.hardware.disk_free, request.placement.disk_limit)


def _least(*sizes: int | None) -> int | None:
    """Return the least of the sizes that are known; None if none is."""
    return min((size for size in sizes if size is not None), default=None)


def _place_on_disk(request: PlanRequest, sizes: TierBytes, limit: int | None, order: str) -> Placed:
    """Return the placement with the fewest layers' KV on disk with which the rest fits into memory."""
    layers, placement = request.shape.layers, request.placement
    for kv in range(request.shape.kv_layers, -1, -1):
        in_memory, on_disk = sizes.on_device(layers, kv), sizes.on_host(layers, kv)
        kept = {name: in_memory.pop(name) for name in ("KV cache", "staging")}
        device = Tier("device", _sorted(in_memory), limit)
        room = None if limit is None else max(limit - device.total, 0)
        host = Tier("host", _sorted(kept), _least(room, placement.host_memory))
        disk, away = Tier("disk", _sorted(on_disk), _disk_limit(request)), request.shape.kv_layers - kv
        placed = Placed(device, host, disk, kv, layers, away, order)
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
    if request.packs_tiers_alone:
        request = replace(request, kv=BF16)

    def fits(steps: int) -> bool:
        longer = replace(request, tokens=steps * _STEP)
        return TierBytes(longer, "chunks").fit(layers, longer.shape.kv_layers, limit)

    most = next(steps for steps in (1 << n for n in range(64)) if not fits(steps))
    return _STEP * (bisect_left(range(1, most), True, key=lambda steps: not fits(steps)))


_ORDER = ("weights", "experts", "KV cache", "mean keys", "retrieval cache", "draft model", "lookup index", "staging")
_ORDER += ("activations", "CUDA")


def _sorted(parts: dict[str, int]) -> dict[str, int]:
    return {name: int(parts[name]) for name in _ORDER if parts.get(name)}


def device_limit(request: PlanRequest) -> int | None:
    """Return the usable bytes of each device: its memory, and no more than the cap."""
    memory = request.hardware.memory
    return _least(None if memory is None else int(memory * USABLE), request.placement.memory)


def _host_limit(request: PlanRequest, device: Tier) -> int | None:
    free = request.hardware.host_memory
    if free is not None and request.hardware.shared:
        free = max(int(free * USABLE) - device.total, 0)
    return _least(free, request.placement.host_memory)


def _keeps_all_kv(request: PlanRequest) -> bool:
    return request.placement.offload == "none" or request.has_one_memory


def _wanted_kv(request: PlanRequest) -> int:
    """Return how many layers' KV shall stay on the device, if it has room."""
    requested, every = request.placement.resident_layers, request.shape.kv_layers
    if _keeps_all_kv(request):
        return every
    if request.hardware.shared and requested is None and request.placement.memory is None:
        return 0  # whoever simulates a link wants to see it used
    return every if requested is None else min(requested, every)


def _resident_counts(request: PlanRequest, sizes: TierBytes, limit: int | None) -> tuple[int, int, int]:
    """Return how many layers' weights, and how many layers' KV, stay on the device: all weights before any KV. And 0.

    A requested number of resident layers is kept even if it does not fit: the plan then says so.
    """
    layers, requested, wanted = request.shape.layers, request.placement.resident_layers, _wanted_kv(request)
    if _keeps_all_kv(request) or limit is None or sizes.fit(layers, wanted, limit):
        return layers, wanted, 0
    for kv in range(wanted, -1, -1) if requested is None else ():
        if sizes.fit(layers, kv, limit):
            return layers, kv, 0
    kv = sizes.smallest_kv if requested is None else wanted
    if requested is not None and sizes.fit(layers, 0, limit):
        return layers, wanted, 0  # the requested KV does not fit, but the weights do
    if request.shape.linear is not None:
        return layers, kv, 0  # whose weights are not streamed
    return next((weights for weights in range(layers - 1, 0, -1) if sizes.fit(weights, kv, limit)), 0), kv, 0


def _counts_of_experts(request: PlanRequest, sizes: TierBytes, limit: int | None) -> tuple[int, int, int]:
    """Return the layers whose weights but experts, and whose KV, stay on the device, and those whose experts do not.

    All KV comes before any experts. A requested number of resident layers is kept even if it does not fit.
    """
    layers, sparse, wanted = request.shape.layers, sizes.sparse_layers, _wanted_kv(request)
    is_simulated = request.hardware.shared and request.placement.memory is None  # as in `_wanted_kv`
    if limit is None:
        return layers, wanted, sparse if is_simulated else 0
    away, kv = sparse, wanted
    if not _keeps_all_kv(request) and request.placement.resident_layers is None:
        fitting = (kv for kv in range(wanted, -1, -1) if sizes.fit(layers, kv, limit, away))
        kv = next(fitting, min(sizes.smallest_kv, wanted))
    if not is_simulated:
        away = next((n for n in range(sparse + 1) if sizes.fit(layers, kv, limit, n)), sparse)
    return layers, kv, away
