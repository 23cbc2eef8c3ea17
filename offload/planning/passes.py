"""The times of a placed request's passes, by roofline.py: of the target, of the retrieval cache, of a draft model."""

from collections.abc import Callable
from dataclasses import replace

from ..architecture.dims import Dimensions
from ..architecture.footprint import page_tokens
from ..architecture.head_shape import drafter_bits
from ..architecture.kv_formats import format_bytes, stored_bytes
from ..architecture.parameters import WeightBits
from ..architecture.tier_footprint import copied_pages, copy_bytes_for
from ..hardware.rates import READ
from ..settings.kv_formats import BF16, KV_FORMATS, PACKED_KV, PLANE_KV
from ..settings.method_sizes import has_draft_model, whole_format
from ..settings.placement_settings import STREAMED
from .expert_times import on_host
from .placement import Placed
from .request import PlanRequest
from .roofline import (
    ARRANGED_PAGES,
    LAUNCH_S,
    PAGE_ATTENTION_S,
    PAGE_S,
    SAMPLE_S,
    Pass,
    Time,
    pass_time,
    quantized_rows,
)

SHARES = 64  # steps of the search for the host's share


class Passes:
    """Passes of a placed request, each timed once.

    A pass is over so many `rows` of each sequence; all of the request's take part in it, at the same level.

    Attributes:
        pages: of an offloaded layer's keys and values.
        page_share: of the seconds that launching a page takes that is copied by itself, where runs are copied at once.
        sample_s: the seconds in which a token is drawn.
        agreement: how often the weights that the retrieval cache is read with choose the token of the model's own.
    """

    def __init__(self, request: PlanRequest, placed: Placed) -> None:
        self.request, self.placed = request, placed
        self.sample_s = SAMPLE_S[request.hardware.device] * (1 if request.static_batch else request.sequences)
        page = page_tokens(request.shape.share(request.hardware.gpus), request.itemsize)
        self.pages = -(-request.tokens // page)
        each = format_bytes(request.shape.share(request.hardware.gpus), request.kv, page, request.itemsize)
        run = 1 if placed.uses_disk else copied_pages(each, self.pages, copy_bytes_for(request.hardware.link))
        joining = 2 * LAUNCH_S if request.has_planes else 0.0
        self.page_share = (PAGE_ATTENTION_S + (PAGE_S - PAGE_ATTENTION_S + joining) / run) / PAGE_S
        self._full: dict[int, tuple[Time, float]] = {}
        self._linears: dict[int, Pass] = {}

    def full(self, rows: int) -> tuple[Time, float]:
        """Return the time of a target pass over the full cache, and the host's share with which it is fastest."""
        if rows not in self._full:
            work = self._full_pass(rows)
            times = [(pass_time(work(share), self.request.hardware), share) for share in self._shares()]
            self._full[rows] = min(times, key=lambda pair: pair[0].seconds)
        return self._full[rows]

    def _shares(self) -> list[float]:
        placement, placed = self.request.placement, self.placed
        asked = placement.offload != "auto" or placement.host_share is not None
        # Beside a simulated link the host's cores are the device's, and converting codes keeps them busy.
        converts = self.request.kv_format.lossy and self.request.hardware.shared
        streams = placement.offload in STREAMED or (converts and not asked)
        if streams or placed.uses_disk or placed.resident_layers == self.request.shape.kv_layers:
            return [0.0]
        if placement.offload == "host":
            return [1.0]
        return [n / SHARES for n in range(SHARES + 1)] if placement.host_share is None else [placement.host_share]

    def _full_pass(self, rows: int) -> Callable[[float], Pass]:
        """Return a function of the host's share: plans try many, and most of the work is the same with each."""
        request, shape = self.request, self.request.shape
        count, gpus = request.sequences, request.hardware.gpus
        windows = count * shape.window_bytes(request.tokens, request.itemsize)
        each = (count * request.kv_bytes(request.tokens) - windows) / shape.kv_layers
        layers, (grown_reads, window_reads) = shape.kv_layers - self.placed.resident_layers, shape.kv_reads
        kv = windows * window_reads + each * shape.kv_layers * grown_reads + count * shape.moved_state_bytes
        again = shape.borrowing[0] if layers else 0  # layers that read the last one's, which is offloaded
        offloaded = each * (layers + again)
        copied = 0.0 if request.has_one_memory else offloaded
        joined = 0.0
        if request.has_planes:  # plane B is copied; both are read and written once more before attention reads them
            copied, joined = offloaded * self._plane_b, 2 * offloaded
        scoring = count * attention_flops(shape, request.tokens, rows)
        base = self.linears(rows)
        base = replace(
            base,
            kv_rate=request.kv_format.rate,
            kv_format=request.kv,
            disk=self.on_disk * (1 + again / self.placed.disk_layers) if self.on_disk else 0.0,
            graphed=base.graphed and not offloaded and (request.hardware.shared or not request.kv_format.lossy),
            away_layers=count * layers,
        )

        def with_share(share: float) -> Pass:
            hosted = share * offloaded
            return replace(
                base,
                kv=(kv - hosted + joined) / gpus,
                copied=base.copied + max(copied - hosted, 0) / gpus,
                hosted=hosted,
                attention_flops=scoring * (1 - hosted / kv) / gpus,
                hosted_flops=scoring * hosted / kv,
                pages=base.pages + (1 - share) * (layers + again) * count * self.pages * self.page_share,
                folded_layers=count * (layers + again) if hosted else 0,
            )

        return with_share

    @property
    def _plane_b(self) -> float:
        """Return the share of plane B in packed bytes."""
        dim = self.request.shape.head_dim
        return 1 - PLANE_KV.run_bytes(dim) / PACKED_KV.run_bytes(dim)

    def linears(self, rows: int) -> Pass:
        """Return the target's linear layers; weights that are not resident are copied over the link."""
        request, shape, placed = self.request, self.request.shape, self.placed
        if rows not in self._linears:
            work = linear_pass(shape, request, rows, request.hardware.gpus, shape.layers - placed.weight_layers)
            self._linears[rows] = with_experts_away(work, request, placed)
        return self._linears[rows]

    def retrieval(self, rows: int) -> float:
        """Return the seconds of a target pass over the retrieval cache."""
        request, shape, gpus = self.request, self.request.shape, self.request.hardware.gpus
        budget, count = request.budget, request.sequences
        offloaded = shape.kv_layers - self.placed.resident_layers
        kind = request.kv if request.in_place(offloaded) else BF16  # else it has copies
        kind = whole_format(request.speculation) or kind
        grown_reads, window_reads = shape.kv_reads
        fixed = window_reads * shape.window_bytes(request.tokens, request.itemsize) + shape.moved_state_bytes
        kv = count * (fixed + grown_reads * stored_bytes(shape.growing, kind, budget, request.itemsize))
        if request.has_planes:  # resident layers are plain, and read as they are
            exact = request.itemsize * 8 / KV_FORMATS[kind].number_bits(shape.head_dim)
            kv *= 1 + (exact - 1) * (1 - offloaded / shape.kv_layers)
        scoring = count * attention_flops(shape, budget, rows)
        work = replace(
            self.linears(rows),
            kv=kv / gpus,
            kv_rate=KV_FORMATS[kind].rate,
            kv_format=kind,
            attention_flops=scoring / gpus,
        )
        if request.has_planes:  # drafted tokens are stored in open pages, by passes that are not recorded
            work = replace(work, graphed=False, away_layers=count * offloaded)
        return pass_time(work, request.hardware).seconds

    @property
    def on_disk(self) -> float:
        """Return the bytes of KV on disk, of all tokens of all sequences."""
        request, placed = self.request, self.placed
        each = stored_bytes(request.shape.growing, request.kv, request.tokens, request.itemsize)
        return placed.disk_layers / request.shape.kv_layers * request.sequences * each

    def scoring(self) -> float:
        """Return the seconds in which a selection reads the keys of a GPU's resident layers; a CPU keeps mean keys.

        They are those of all sequences. From disk, new chunks are read page by page: at most all of it.
        """
        request, hardware = self.request, self.request.hardware
        reading = self.on_disk / hardware.disk_rate if self.on_disk else 0.0
        if hardware.shared:
            return reading
        resident = self.placed.resident_layers / request.shape.kv_layers
        kv = request.sequences * request.shape.growing.kv_bytes(request.tokens, request.itemsize)
        keys = resident * kv / 2 / hardware.gpus
        return reading + keys / hardware.bandwidth / READ

    def draft_step(self, rows: int = 1) -> float:
        """Return the seconds of a step of the draft model, which each device has whole; 0 for lookup."""
        request, settings = self.request, self.request.speculation
        if request.draft is None or not has_draft_model(settings):
            return 0.0
        bits = drafter_bits(request.draft, request.bits, request.itemsize)
        work = linear_pass(request.draft, request, rows, 1, 0, bits)
        room = request.sequences * (settings.sink + settings.window)
        work = replace(work, kv=request.draft.kv_bytes(room, request.itemsize))
        return pass_time(work, replace(request.hardware, gpus=1)).seconds + self.sample_s


def linear_pass(
    shape: Dimensions, request: PlanRequest, rows: int, gpus: int, streamed: int, bits: WeightBits | None = None
) -> Pass:
    """Return a pass over `rows` of each sequence without attention, with `streamed` layers' weights in host memory.

    It is a CUDA graph on a single GPU that has all weights, if its kernels are those of one sequence. `bits` are those
    of the weights, if not the model's own.
    """
    if bits is None:
        bits = request.bits if shape is request.shape else WeightBits.of_dtype(request.itemsize)
    quantized = bits.is_quantized(request.itemsize) and request.hardware.device == "cuda"
    rows *= request.sequences
    operations = 2 * shape.read_parameters * (quantized_rows(rows) if quantized else rows)
    return Pass(
        rows=rows,
        layers=shape.layers,
        row_bytes=shape.hidden * request.itemsize,
        weights=shape.read_bytes(bits, rows) / gpus,
        kv=0.0,
        copied=streamed * shape.layer_bytes(bits) / gpus,
        hosted=0.0,
        linear_flops=operations / gpus,
        attention_flops=0.0,
        hosted_flops=0.0,
        graphed=_is_graphed(shape, request, streamed),
        pages=streamed,
        quantized=quantized,
        sequences=request.sequences,
        experts=shape.experts.distinct(rows) * shape.experts.layers if shape.experts else 0.0,
    )


def with_experts_away(work: Pass, request: PlanRequest, placed: Placed) -> Pass:
    """Return a pass of the target with the experts that lie in host memory, as the placement runs them."""
    if not placed.away_layers:
        return work
    experts, gpus = request.shape.experts, request.hardware.gpus
    each, layers = request.shape.expert_bytes(request.bits) / experts.count, placed.away_layers
    run = experts.distinct(work.rows) * layers
    if placed.experts_way(work.rows) == "host":
        hosted = on_host(request, work, layers)
        return replace(
            hosted,
            weights=work.weights - run * each / gpus,
            linear_flops=work.linear_flops - hosted.hosted_expert_flops / gpus,
            experts=work.experts - run,
        )
    whole = experts.count * layers
    pages = work.pages + ARRANGED_PAGES[request.is_quantized] * whole
    return replace(work, copied=work.copied + whole * each / gpus, pages=pages)


def _is_graphed(shape: Dimensions, request: PlanRequest, streamed: int) -> bool:
    """Return whether passes are CUDA graphs: not with experts, chosen by the tokens, or with linear attention."""
    is_fixed = not streamed and shape.experts is None and shape.linear is None
    return request.hardware.gpus == 1 and is_fixed and (request.static_batch or request.sequences == 1)


def attention_flops(shape: Dimensions, tokens: int, rows: int) -> float:
    """Return the floating-point operations of attention: two for q . k and two for p . v."""
    return 4.0 * shape.attention_products(tokens) * rows
