"""Placement of weights, experts and KV cache: as much on each device as fits, and first the parts read most often.

A placement never exceeds a cap silently; what does not fit is reported with the numbers.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..settings.kv_formats import BF16
from .inputs import PlanInputs
from .memory import USABLE, MemoryPlan, Tier, tier
from .passes import streamed_rows

_STEP = 1024  # tokens


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement. The device tier is the memory of one GPU, alike on all; the GPUs share the host tier.

    Attributes:
        disk: has the KV of the last `disk_layers`; the host has the KV of other layers that are not resident.
        resident_layers, weight_layers: how many layers' KV, and weights, stay on the device.
        by_layers: prefill loops over layers, then over chunks, and reads no KV back; False: chunks, then layers.
        away_layers: how many sparse layers have their experts in host memory.
        streamed_rows: rows of the least pass that copies those experts to the device; in others the host runs them.
    """

    device: Tier
    host: Tier
    disk: Tier
    resident_layers: int
    weight_layers: int
    disk_layers: int
    by_layers: bool
    away_layers: int = 0
    streamed_rows: int = 0

    @property
    def fits(self) -> bool:
        return not self.device.missing and not self.host.missing and not self.disk.missing

    def hosts_experts(self, rows: int) -> bool:
        """Return whether the host runs experts in a pass over `rows` rows."""
        return self.away_layers > 0 and rows < self.streamed_rows

    @property
    def uses_disk(self) -> bool:
        """Return whether KV that is not resident lies on disk."""
        return bool(self.disk.parts)


def place(inputs: PlanInputs) -> Placed:
    """Return the placement with most on the device: weights first, which every level reads, then KV layer by layer.

    Of a mixture of experts that does not fit with its KV, the experts come last: a pass reads all other weights and all
    KV, but a few experts of each layer. Prefill runs in layer order if that leaves room for the weights and for the
    requested KV layers.
    """
    limit, must_host = device_limit(inputs), inputs.placement.experts == "host"
    wanted = MemoryPlan(inputs)
    has_room = limit is None or wanted.fits(inputs.shape.layers, _wanted_kv(inputs), limit)
    if inputs.may_host_experts and (must_host or not has_room):
        placed = _in_best_order(inputs, hosts_experts=True)
        if placed.fits or must_host:
            return placed
    return _in_best_order(inputs, hosts_experts=False)


def _in_best_order(inputs: PlanInputs, hosts_experts: bool) -> Placed:
    shape, by_chunks = inputs.shape, place_in_order(inputs, False, hosts_experts)
    # Chunk after chunk of a prompt then copies nothing to the device again.
    is_resident = (by_chunks.resident_layers, by_chunks.weight_layers) == (shape.kv_layers, shape.layers)
    reads_nothing_back = is_resident and not by_chunks.away_layers
    if reads_nothing_back or inputs.kv_format.lossy or not shape.runs_by_layers:  # lossy pages are made by chunks
        return by_chunks
    by_layers = place_in_order(inputs, True, hosts_experts)
    return by_layers if by_layers.fits and by_layers.weight_layers == by_chunks.weight_layers else by_chunks


def place_in_order(inputs: PlanInputs, by_layers: bool, hosts_experts: bool = False) -> Placed:
    """Return the placement with most on the device for a prefill in layer order, or else in chunk order."""
    limit, memory, placement = device_limit(inputs), MemoryPlan(inputs, by_layers, hosts_experts), inputs.placement
    if placement.disk is not None and inputs.has_one_memory:
        return _place_on_disk(memory, limit, by_layers)
    weights, kv, away = _counts_of_experts(memory, limit) if hosts_experts else (*_resident_counts(memory, limit), 0)
    device = tier(memory.device(weights, kv, away), limit)
    room = _host_limit(inputs, device)
    most = inputs.shape.kv_layers - kv if placement.disk is not None else 0
    hosts = (tier(memory.host(weights, kv, away, on_disk), room) for on_disk in range(most + 1))
    on_disk, host = next((n, host) for n, host in enumerate(hosts) if n == most or not host.missing)
    disk = tier(memory.disk(on_disk), _disk_limit(inputs)) if on_disk else Tier({})
    return Placed(device, host, disk, kv, weights, on_disk, by_layers, away, streamed_rows(inputs) if away else 0)


def _place_on_disk(memory: MemoryPlan, limit: int | None, by_layers: bool) -> Placed:
    """Return the placement with the fewest layers' KV on disk with which the rest fits into a CPU's memory."""
    inputs = memory.inputs
    layers, kv_layers = inputs.shape.layers, inputs.shape.kv_layers
    for kv in range(kv_layers, -1, -1):
        in_memory, pages = memory.device(layers, kv), memory.host(layers, kv)
        kept = {name: in_memory.pop(name) for name in ("KV cache", "staging")}
        kept["mean keys"] = pages.pop("mean keys")
        device = tier(in_memory, limit)
        room = None if limit is None else max(limit - device.total, 0)
        host = tier(kept, _least(room, inputs.placement.host_memory))
        disk = tier(pages, _disk_limit(inputs))
        placed = Placed(device, host, disk, kv, layers, kv_layers - kv, by_layers)
        if not (device.missing or host.missing):
            break
    return placed


def resident_tokens(inputs: PlanInputs) -> int | None:
    """Return how many tokens fit, in thousands of 1,024, while all weights and the whole KV cache are on the device.

    It may be more than the model's context. None where the device's memory is not known.
    """
    limit, shape = device_limit(inputs), inputs.shape
    if limit is None:
        return None
    plain = replace(inputs, kv=BF16) if inputs.auto_packed else inputs

    def is_too_long(steps: int) -> bool:
        return not MemoryPlan(replace(plain, tokens=steps * _STEP)).fits(shape.layers, shape.kv_layers, limit)

    most = next(steps for steps in (1 << n for n in range(64)) if is_too_long(steps))
    return bisect_left(range(1, most), True, key=is_too_long) * _STEP


def device_limit(inputs: PlanInputs) -> int | None:
    """Return the usable bytes of each device: its memory, and no more than the cap; None if they are not known."""
    memory = inputs.hardware.memory
    return _least(None if memory is None else int(memory * USABLE), inputs.placement.memory)


def _host_limit(inputs: PlanInputs, device: Tier) -> int | None:
    free = inputs.hardware.host_memory
    if free is not None and inputs.hardware.shared:
        free = max(int(free * USABLE) - device.total, 0)
    return _least(free, inputs.placement.host_memory)


def _disk_limit(inputs: PlanInputs) -> int | None:
    return _least(inputs.hardware.disk_free, inputs.placement.disk_limit)


def _least(*sizes: int | None) -> int | None:
    """Return the least of the sizes that are known; None if none is."""
    return min((size for size in sizes if size is not None), default=None)


def _keeps_all_kv(inputs: PlanInputs) -> bool:
    return inputs.placement.offload == "none" or inputs.has_one_memory


def _wanted_kv(inputs: PlanInputs) -> int:
    """Return how many layers' KV shall stay on the device, if it has room."""
    requested, every = inputs.placement.resident_layers, inputs.shape.kv_layers
    if _keeps_all_kv(inputs):
        return every
    if inputs.hardware.shared and requested is None and inputs.placement.memory is None:
        return 0  # a simulated link is there to be used
    return every if requested is None else min(requested, every)


def _most(counts: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest of the ascending counts that fits; None if none does. Bytes are linear in the count."""
    if counts and fits(counts[-1]):
        return counts[-1]
    fitting = bisect_left(counts, True, key=lambda count: not fits(count))
    return counts[fitting - 1] if fitting else None


def _most_kv(memory: MemoryPlan, limit: int, away: int = 0) -> int | None:
    """Return the most layers whose KV fits beside all weights, up to the number wanted; None if not even 0 do."""
    layers, wanted = memory.inputs.shape.layers, _wanted_kv(memory.inputs)
    if memory.fits(layers, wanted, limit, away):
        return wanted
    return _most(range(wanted), lambda kv: memory.fits(layers, kv, limit, away))


def _resident_counts(memory: MemoryPlan, limit: int | None) -> tuple[int, int]:
    """Return how many layers' weights, and how many layers' KV, stay on the device: all weights before any KV.

    A requested number of resident layers is kept even if it does not fit: the plan then says so.
    """
    inputs, layers, wanted = memory.inputs, memory.inputs.shape.layers, _wanted_kv(memory.inputs)
    if _keeps_all_kv(inputs) or limit is None or memory.fits(layers, wanted, limit):
        return layers, wanted
    kv = wanted
    if inputs.placement.resident_layers is None:
        fitting = _most_kv(memory, limit)
        if fitting is not None:
            return layers, fitting
        kv = memory.smallest_kv
    elif memory.fits(layers, 0, limit):
        return layers, wanted  # the requested KV does not fit, but the weights do
    if inputs.shape.linear is not None:
        return layers, kv  # whose weights are not streamed
    return _most(range(1, layers), lambda weights: memory.fits(weights, kv, limit)) or 0, kv


def _counts_of_experts(memory: MemoryPlan, limit: int | None) -> tuple[int, int, int]:
    """Return the layers whose weights but experts, and whose KV, stay on the device, and those whose experts do not.

    All KV comes before any experts. A requested number of resident layers is kept even if it does not fit.
    """
    inputs, layers, sparse, kv = (
        memory.inputs,
        memory.inputs.shape.layers,
        memory.sparse_layers,
        _wanted_kv(memory.inputs),
    )
    is_simulated = inputs.hardware.shared and inputs.placement.memory is None  # as in `_wanted_kv`
    if limit is None:
        return layers, kv, sparse if is_simulated else 0
    if not _keeps_all_kv(inputs) and inputs.placement.resident_layers is None:
        fitting = _most_kv(memory, limit, sparse)
        kv = min(memory.smallest_kv, kv) if fitting is None else fitting
    if is_simulated:
        return layers, kv, sparse
    if memory.fits(layers, kv, limit, 0):
        return layers, kv, 0
    kept = _most(range(sparse), lambda kept: memory.fits(layers, kv, limit, sparse - kept))
    return layers, kv, sparse - (kept or 0)
