"""What of a run lies where: bytes on each device and on the host, as many layers resident as fit.

A cap is never exceeded in this arithmetic; what does not fit is told, not squeezed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .config import GIB, Placement, Speculation
from .levels import draft_chunk, draft_room, has_draft_model, has_middle
from .parts import activation_bytes, retrieval_bytes
from .resources import Hardware
from .sizes import Sizes

STAGING_BUFFERS = 2  # one fills while the other is attended to
STAGING_BYTES = (
    64 * 2**20
)  # of KV in each: a few milliseconds on any link, so that nothing waits long for its first part
CUDA_BYTES = GIB // 2  # the driver's context and the libraries' workspaces
USABLE = 0.97  # of the device: the rest is the allocator's, which cannot fill every gap


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
    """

    model: str
    shape: Sizes
    tokens: int
    hardware: Hardware
    placement: Placement = field(default_factory=Placement)
    speculation: Speculation = field(default_factory=Speculation)
    prefill_chunk: int = 2048
    itemsize: int = 2
    draft: Sizes | None = None
    acceptance: float | None = None
    draft_acceptance: float | None = None


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
    shape, gpus = request.shape, request.hardware.gpus
    layer_weights = shape.layer_parameters * request.itemsize // gpus
    layer_kv = shape.layer_kv_bytes(request.tokens, request.itemsize) // gpus
    limit = device_limit(request)
    fixed = _fixed(request, order)
    piece = min(layer_kv, STAGING_BYTES)
    reading = layer_kv if order == "layers" else 0  # the layer that is being read, which will not stay
    extra = STAGING_BUFFERS * piece + reading
    weights, kv = _counts(request, sum(fixed.values()), layer_weights, layer_kv, extra, limit)
    if weights < shape.layers or kv < shape.layers:
        fixed["staging"] = STAGING_BUFFERS * (piece if weights == shape.layers else max(layer_weights, piece))
    if kv < shape.layers:
        fixed["activations"] += reading
    fixed["weights"] += weights * layer_weights
    fixed["KV cache"] = kv * layer_kv
    away = {
        "weights": (shape.layers - weights) * layer_weights * gpus,
        "KV cache": (shape.layers - kv) * layer_kv * gpus,
    }
    device = Tier("device", _sorted(fixed), limit)
    return Placed(device, Tier("host", _sorted(away), _host_limit(request, device)), kv, weights, order)


_ORDER = ("weights", "KV cache", "retrieval cache", "draft model", "staging", "activations", "CUDA")


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


def _fixed(request: PlanRequest, order: str) -> dict[str, int]:
    """Everything on the device but layers."""
    shape, settings, hardware, size = request.shape, request.speculation, request.hardware, request.itemsize
    on_cpu = hardware.device == "cpu"
    parts = {"weights": shape.outer_parameters * size // hardware.gpus, "CUDA": 0 if on_cpu else CUDA_BYTES}
    parts["activations"] = activation_bytes(shape, request.tokens, request.prefill_chunk, size, copies=on_cpu)
    if order == "layers":
        parts["activations"] += request.tokens * shape.hidden * size  # between two layers
    if has_middle(settings, request.tokens):
        parts["retrieval cache"] = retrieval_bytes(shape, settings, request.tokens, size) // hardware.gpus
    if request.draft is not None and has_draft_model(settings):
        room = draft_room(settings)
        own = request.draft.parameters * size + request.draft.kv_bytes(room, size)
        parts["draft model"] = own + activation_bytes(request.draft, room, draft_chunk(settings), size, copies=on_cpu)
    return parts


def _is_all_one(request: PlanRequest) -> bool:
    """On a CPU whose memory nobody has divided, there is nothing to move."""
    placement = request.placement
    undivided = placement.offload == "auto" and placement.memory is None and placement.resident_layers is None
    return request.hardware.shared and undivided


def _counts(
    request: PlanRequest, fixed: int, layer_weights: int, layer_kv: int, extra: int, limit: int | None
) -> tuple[int, int]:
    """Layers whose weights, and whose KV, stay on the device; `extra` bytes are needed if some KV does not.

    A number of resident layers that was asked for is kept even where it does not fit: the plan then says so.
    """
    layers, placement = request.shape.layers, request.placement
    wanted = layers if placement.resident_layers is None else min(placement.resident_layers, layers)
    if placement.offload == "none" or _is_all_one(request):
        return layers, layers
    if limit is None:
        return layers, wanted
    free = limit - fixed
    if wanted == layers and free >= layers * (layer_weights + layer_kv):
        return layers, layers
    free -= extra
    if free >= layers * layer_weights:
        room = (free - layers * layer_weights) // layer_kv
        return layers, wanted if placement.resident_layers is not None else min(room, layers - 1)
    wanted = 0 if placement.resident_layers is None else wanted
    free -= wanted * layer_kv + STAGING_BUFFERS * max(layer_weights - min(layer_kv, STAGING_BYTES), 0)
    return min(max(free // layer_weights, 0), layers - 1), wanted
