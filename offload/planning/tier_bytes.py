"""The bytes of a plan's parts on each device and on the host."""

from dataclasses import replace

from ..architecture.footprint import PAGE_GRAIN, expert_row_bytes, page_tokens
from ..architecture.kv_formats import bf16_layer_bytes, format_bytes
from ..architecture.tier_footprint import (
    BOUNCE_BUFFERS,
    DISK_READ_BYTES,
    RING_BUFFERS,
    copied_pages,
    copy_bytes_for,
    disk_buffers,
    host_mean_key_bytes,
    host_page_bytes,
    open_slots,
    packing_bytes,
    staging_bytes,
)
from ..settings.kv_formats import BF16, PACKED_KV, PLANE_KV
from ..settings.method_sizes import selected_chunk, tree_nodes, whole_format
from .memory import MemoryEstimate, estimate
from .request import PlanRequest

STAGING_BUFFERS = 2  # one fills while the other is attended to
ARRANGED_EXPERTS = {False: 2, True: 5}  # whose bytes it takes to unpack one; quantised, its codes have a byte each


class TierBytes:
    """The bytes of a request's parts, for given numbers of layers whose weights and KV stay on the device.

    Args:
        order: of the prefill, as `Placed.prefill_order`.
        way: as `Placed.experts`. `away` below is the number of layers with experts in host memory.
    """

    def __init__(self, request: PlanRequest, order: str, way: str = "device") -> None:
        size, gpus = request.itemsize, request.hardware.gpus
        self._way, self._experts = way, request.shape.expert_bytes(request.bits) // gpus  # bytes, of a sparse layer
        self._request, self._gpus, self._layers, self._order = request, gpus, request.shape.layers, order
        self._kv_layers = request.shape.kv_layers
        share = request.shape.share(gpus)
        page = page_tokens(share, size)
        self._share, self._page, self._bf16 = share, page, 0
        if request.kv_format.lossy:  # its newest tokens and the sink stay on the device
            self._bf16 = bf16_layer_bytes(share, request.tokens, request.prefill_chunk, size)
        self._needs: dict[int, MemoryEstimate] = {}

    def _need(self, kv: int) -> MemoryEstimate:
        """Return the estimate for so many layers whose KV stays on the device.

        Of many that do not, each adds as many bytes of mean keys as the second.
        """
        if kv not in self._needs:
            away = self._kv_layers - kv
            if away <= 2:
                self._needs[kv] = _estimate(self._request, away, self._order == "layers")
            else:
                one, two = self._need(self._kv_layers - 1).retrieval, self._need(self._kv_layers - 2)
                self._needs[kv] = replace(two, retrieval=one + (away - 1) * (two.retrieval - one))
        return self._needs[kv]

    @property
    def sparse_layers(self) -> int:
        """Return how many layers have experts."""
        return self._request.shape.experts.layers if self._request.shape.experts else 0

    def on_device(self, weights: int, kv: int, away: int = 0) -> dict[str, int]:
        """Return the bytes of each part on each device."""
        need, offloaded = self._need(kv), self._kv_layers - kv
        parts = {
            "weights": need.outer_weights + weights * need.layer_weights,
            "KV cache": kv * need.layer_kv
            + need.fixed_kv
            + self._request.sequences * offloaded * (self._bf16 + self._planes),
            "retrieval cache": need.retrieval,
            "draft model": need.draft,
            "lookup index": need.lookup,
            "staging": self._request.sequences * self._staging(offloaded) if offloaded else 0,
            "activations": need.activations,
            "CUDA": need.cuda,
        }
        if weights < self._layers:
            parts["staging"] += STAGING_BUFFERS * need.layer_weights
        if self._way != "device":
            parts["experts"] = (self.sparse_layers - away) * self._experts
            parts["weights"] -= self.sparse_layers * self._experts
        if self._way == "host" and away:
            parts["staging"] += STAGING_BUFFERS * self._experts + self._arranging
        return parts

    @property
    def _planes(self) -> int:
        """Return the bytes of planes A of a layer; 0 without planes."""
        request, page = self._request, self._page
        pages = -(-(request.tokens + tree_nodes(request.speculation)) // page)
        return pages * format_bytes(self._share, PLANE_KV.name, page, request.itemsize) if request.has_planes else 0

    @property
    def _arranging(self) -> int:
        """Return the bytes in which an expert that has arrived in the host's layout is unpacked."""
        request, experts = self._request, self._request.shape.experts
        if self._way == "device" or experts is None or request.hardware.shared:
            return 0
        return ARRANGED_EXPERTS[request.is_quantized] * self._experts // experts.count

    def on_host(self, weights: int, kv: int, away: int = 0, on_disk: int = 0) -> dict[str, int]:
        """Return the bytes of each part on the host, for all devices; `on_disk` layers' pages are not there."""
        request, offloaded, page, size = self._request, self._kv_layers - kv, self._page, self._request.itemsize
        need, positions, count = self._need(kv), request.tokens + tree_nodes(request.speculation), request.sequences
        parts = {
            "weights": (self._layers - weights) * need.layer_weights + need.host_weights // self._gpus,
            "KV cache": count
            * host_page_bytes(self._share, offloaded - on_disk, positions, page, size, request.kv, request.has_planes),
            "experts": away * self._experts,
            "staging": BOUNCE_BUFFERS * DISK_READ_BYTES if on_disk else 0,
        }
        if self._way == "host" and away:
            parts["activations"] = min(request.prefill_chunk, request.tokens) * expert_row_bytes(self._share, 4)
        keeps_means = need.retrieval and not request.hardware.shared and not request.kv_format.lossy
        if keeps_means and whole_format(request.speculation) is None:  # made by that prefill
            chunk = selected_chunk(request.speculation, PAGE_GRAIN, page, request.tokens)
            parts["mean keys"] = count * host_mean_key_bytes(self._share, offloaded, request.tokens, chunk, page, size)
        return {name: each * self._gpus for name, each in parts.items()}

    def on_disk(self, layers: int) -> dict[str, int]:
        """Return the bytes of so many layers' pages on disk, for all devices."""
        request = self._request
        positions, size = request.tokens + tree_nodes(request.speculation), request.itemsize
        pages = host_page_bytes(self._share, layers, positions, self._page, size, request.kv)
        return {"KV cache": request.sequences * pages * self._gpus}

    def _staging(self, offloaded: int) -> int:
        """Return the bytes for prefetched pages, and for the open pages of `offloaded` layers."""
        request, page, size = self._request, self._page, self._request.itemsize
        kv = request.kv if request.kv_format.lossy else BF16  # buffers have room for pages that cannot be packed
        slots = open_slots(min(request.prefill_chunk, request.tokens), page, kv)
        each = format_bytes(self._share, kv, page, size)
        pages = -(-(request.tokens + tree_nodes(request.speculation)) // page)
        buffers = RING_BUFFERS * copied_pages(each, pages, copy_bytes_for(request.hardware.link))
        if request.placement.disk is not None:
            buffers = disk_buffers(each)
        staged = staging_bytes(self._share, offloaded, buffers, page, size, kv, slots)
        if request.kv_format is PACKED_KV and not request.hardware.shared:
            staged += packing_bytes(self._share, offloaded, page)
        return staged

    def fit(self, weights: int, kv: int, limit: int, away: int = 0) -> bool:
        """Return whether the device's parts fit into `limit` bytes."""
        return sum(self.on_device(weights, kv, away).values()) <= limit

    @property
    def smallest_kv(self) -> int:
        """Return the number of resident layers that takes least memory: 0, unless streaming takes more."""
        staging = self._request.sequences * (self._staging(2) - self._staging(1))
        return 0 if self._need(0).layer_kv > staging else self._kv_layers


def _estimate(request: PlanRequest, offloaded: int, by_layers: bool) -> MemoryEstimate:
    """Return the memory estimate of each device, with so many layers whose KV is in host memory."""
    is_plain = request.has_planes and request.packs_tiers_alone and not offloaded  # in one memory, AUTO packs nothing
    need = estimate(
        request.shape,
        request.tokens,
        request.speculation,
        device=request.hardware.device,
        itemsize=request.itemsize,
        prefill_chunk=request.prefill_chunk,
        draft=request.draft,
        in_place=request.in_place(offloaded),
        weight_bits=request.bits,
        gpus=request.hardware.gpus,
        offloaded=offloaded,
        by_layers=by_layers,
        kv=BF16 if is_plain else request.kv,
    )
    return need.for_sequences(request.sequences, 0 if offloaded else request.shared)
