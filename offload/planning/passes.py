"""The times of a placed request's passes: of the target, of the retrieval cache, of a draft model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..architecture.dims import Dimensions, WeightBits
from ..architecture.head_shape import drafter_bits
from ..architecture.kv_formats import format_bytes, stored_bytes
from ..architecture.pages import copied_pages, copy_bytes_for, page_tokens
from ..hardware.rates import READ
from ..settings.kv_formats import BF16, KV_FORMATS, PACKED_KV, PLANE_KV
from ..settings.method_sizes import has_draft_model, whole_format
from ..settings.placement_settings import STREAMED
from .inputs import PlanInputs
from .roofline import (
    ARRANGED_PAGES,
    LAUNCH_S,
    PAGE_ATTENTION_S,
    PAGE_S,
    SAMPLE_S,
    HostedExperts,
    Pass,
    Time,
    pass_time,
    quantized_rows,
)

if TYPE_CHECKING:
    from .placement import Placed

SHARES = 64  # steps of the search for the host's share
_MOST_ROWS = 1 << 16  # where copying experts never pays, passes of so many rows do


class Passes:
    """Passes of a placed request, each timed once.

    Attributes:
        pages: of an offloaded layer's keys and values.
        page_share: of the seconds that launching a page takes that is copied by itself, where runs are copied at once.
        sample_s: the seconds in which a token is drawn.
    """

    def __init__(self, inputs: PlanInputs, placed: Placed) -> None:
        self.inputs, self.placed = inputs, placed
        self.sample_s = SAMPLE_S[inputs.hardware.device]
        share = inputs.shape.share(inputs.hardware.gpus)
        page = page_tokens(share, inputs.itemsize)
        self.pages = -(-inputs.tokens // page)
        page_size = format_bytes(share, inputs.kv, page, inputs.itemsize)
        run = 1 if placed.uses_disk else copied_pages(page_size, self.pages, copy_bytes_for(inputs.hardware.link))
        joining = 2 * LAUNCH_S if inputs.has_planes else 0.0
        self.page_share = (PAGE_ATTENTION_S + (PAGE_S - PAGE_ATTENTION_S + joining) / run) / PAGE_S
        self._full: dict[int, tuple[Time, float]] = {}
        self._linears: dict[int, Pass] = {}

    def full(self, rows: int) -> tuple[Time, float]:
        """Return the time of a target pass over the full cache, and the host's share with which it is fastest."""
        if rows not in self._full:
            work = self._full_pass(rows)
            times = [(pass_time(work(share), self.inputs.hardware), share) for share in self._shares()]
            self._full[rows] = min(times, key=lambda pair: pair[0].seconds)
        return self._full[rows]

    def _shares(self) -> list[float]:
        placement, placed = self.inputs.placement, self.placed
        asked = placement.offload != "auto" or placement.host_share is not None
        # Beside a simulated link the host's cores are the device's, and converting codes keeps them busy.
        converts = self.inputs.kv_format.lossy and self.inputs.hardware.shared
        streams = placement.offload in STREAMED or (converts and not asked)
        if streams or placed.uses_disk or placed.resident_layers == self.inputs.shape.kv_layers:
            return [0.0]
        if placement.offload == "host":
            return [1.0]
        return [n / SHARES for n in range(SHARES + 1)] if placement.host_share is None else [placement.host_share]

    def _full_pass(self, rows: int) -> Callable[[float], Pass]:
        """Return a function of the host's share: plans try many, and most of the work is the same with each."""
        inputs, shape = self.inputs, self.inputs.shape
        gpus, windows = inputs.hardware.gpus, shape.window_bytes(inputs.tokens, inputs.itemsize)
        layer_kv = (inputs.kv_bytes(inputs.tokens) - windows) / shape.kv_layers
        layers, (grown_reads, window_reads) = shape.kv_layers - self.placed.resident_layers, shape.kv_reads
        kv = windows * window_reads + layer_kv * shape.kv_layers * grown_reads + shape.moved_state_bytes
        again = shape.borrowing[0] if layers else 0  # layers that read the last one's, which is offloaded
        offloaded = layer_kv * (layers + again)
        copied = 0.0 if inputs.has_one_memory else offloaded
        joined = 0.0
        if inputs.has_planes:  # plane B is copied; both are read and written once more before attention reads them
            plane_a = PLANE_KV.run_bytes(shape.head_dim) / PACKED_KV.run_bytes(shape.head_dim)
            copied, joined = offloaded * (1 - plane_a), 2 * offloaded
        scoring = attention_flops(shape, inputs.tokens, rows)
        base = self.linears(rows)
        base = replace(
            base,
            kv_format=inputs.kv,
            disk=self.on_disk * (1 + again / self.placed.disk_layers) if self.on_disk else 0.0,
            graphed=base.graphed and not offloaded and (inputs.hardware.shared or not inputs.kv_format.lossy),
            away_layers=layers,
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
                pages=base.pages + (1 - share) * (layers + again) * self.pages * self.page_share,
                folded_layers=layers + again if hosted else 0,
            )

        return with_share

    def linears(self, rows: int) -> Pass:
        """Return the target's linear layers; weights that are not resident are copied over the link."""
        inputs, shape, placed = self.inputs, self.inputs.shape, self.placed
        if rows not in self._linears:
            streamed = shape.layers - placed.weight_layers
            work = linear_pass(shape, inputs, rows, inputs.hardware.gpus, streamed, inputs.bits)
            self._linears[rows] = _with_experts_away(work, inputs, placed) if placed.away_layers else work
        return self._linears[rows]

    def retrieval(self, rows: int) -> float:
        """Return the seconds of a target pass over the retrieval cache."""
        inputs, shape, gpus = self.inputs, self.inputs.shape, self.inputs.hardware.gpus
        budget, offloaded = inputs.budget, shape.kv_layers - self.placed.resident_layers
        kind = whole_format(inputs.speculation) or (inputs.kv if inputs.in_place(offloaded) else BF16)  # else copies
        grown_reads, window_reads = shape.kv_reads
        fixed = window_reads * shape.window_bytes(inputs.tokens, inputs.itemsize) + shape.moved_state_bytes
        kv = fixed + grown_reads * stored_bytes(shape.full_attention, kind, budget, inputs.itemsize)
        if inputs.has_planes:  # resident layers are plain, and read as they are
            exact = inputs.itemsize * 8 / KV_FORMATS[kind].number_bits(shape.head_dim)
            kv *= 1 + (exact - 1) * (1 - offloaded / shape.kv_layers)
        scoring = attention_flops(shape, budget, rows)
        work = replace(self.linears(rows), kv=kv / gpus, kv_format=kind, attention_flops=scoring / gpus)
        if inputs.has_planes:  # drafted tokens are stored in open pages, by passes that are not recorded
            work = replace(work, graphed=False, away_layers=offloaded)
        return pass_time(work, inputs.hardware).seconds

    @property
    def on_disk(self) -> float:
        """Return the bytes of KV on disk."""
        inputs, placed = self.inputs, self.placed
        kv = stored_bytes(inputs.shape.full_attention, inputs.kv, inputs.tokens, inputs.itemsize)
        return placed.disk_layers / inputs.shape.kv_layers * kv

    def selecting(self) -> float:
        """Return the seconds in which a selection reads the keys of a GPU's resident layers.

        A CPU keeps mean keys. From disk, new chunks are read page by page: at most all of it.
        """
        inputs, hardware = self.inputs, self.inputs.hardware
        reading = self.on_disk / hardware.disk_rate if self.on_disk else 0.0
        if hardware.shared:
            return reading
        resident = self.placed.resident_layers / inputs.shape.kv_layers
        kv = inputs.shape.full_attention.kv_bytes(inputs.tokens, inputs.itemsize)
        keys = resident * kv / 2 / hardware.gpus
        return reading + keys / hardware.bandwidth / READ

    def draft_step(self, rows: int = 1) -> float:
        """Return the seconds of a step of the draft model, which each device has whole; 0 for lookup."""
        inputs, settings = self.inputs, self.inputs.speculation
        if inputs.draft is None or not has_draft_model(settings):
            return 0.0
        bits = drafter_bits(inputs.draft, inputs.bits, inputs.itemsize)
        work = linear_pass(inputs.draft, inputs, rows, 1, 0, bits)
        work = replace(work, kv=inputs.draft.kv_bytes(settings.sink + settings.window, inputs.itemsize))
        return pass_time(work, replace(inputs.hardware, gpus=1)).seconds + self.sample_s


def linear_pass(shape: Dimensions, inputs: PlanInputs, rows: int, gpus: int, streamed: int, bits: WeightBits) -> Pass:
    """Return a pass over `rows` without attention, with `streamed` layers' weights in host memory.

    It is a CUDA graph on a single GPU that has all weights: not with experts, which the tokens choose, or with linear
    attention.
    """
    quantized = bits.is_quantized(inputs.itemsize) and inputs.hardware.device == "cuda"
    is_fixed = not streamed and shape.experts is None and shape.linear is None
    operations = 2 * shape.read_parameters * (quantized_rows(rows) if quantized else rows)
    return Pass(
        rows=rows,
        layers=shape.layers,
        row_bytes=shape.hidden * inputs.itemsize,
        weights=shape.read_bytes(bits, rows) / gpus,
        copied=streamed * shape.layer_bytes(bits) / gpus,
        linear_flops=operations / gpus,
        graphed=inputs.hardware.gpus == 1 and is_fixed,
        pages=streamed,
        quantized=quantized,
        experts=shape.experts.distinct(rows) * shape.experts.layers if shape.experts else 0.0,
    )


def _with_experts_away(work: Pass, inputs: PlanInputs, placed: Placed) -> Pass:
    """Return a pass of the target with the experts that lie in host memory: the host runs them, or they are copied."""
    experts, gpus, layers = inputs.shape.experts, inputs.hardware.gpus, placed.away_layers
    assert experts is not None, "only layers with experts have them away"
    expert_bytes = inputs.shape.expert_bytes(inputs.bits) / experts.count
    if placed.hosts_experts(work.rows):
        run, hosted = experts.distinct(work.rows) * layers, experts_on_host(inputs, work.rows, layers)
        return replace(
            work,
            weights=work.weights - run * expert_bytes / gpus,
            linear_flops=work.linear_flops - hosted.flops / gpus,
            experts=work.experts - run,
            hosted_experts=hosted,
        )
    whole = experts.count * layers
    pages = work.pages + ARRANGED_PAGES[inputs.is_quantized] * whole
    return replace(work, copied=work.copied + whole * expert_bytes / gpus, pages=pages)


def experts_on_host(inputs: PlanInputs, rows: int, layers: int) -> HostedExperts:
    """Return the work of the experts of some layers, in a pass of so many rows, on the host."""
    experts = inputs.shape.experts
    assert experts is not None, "only layers with experts have them away"
    run = experts.distinct(rows) * layers
    return HostedExperts(
        weights=run * inputs.shape.expert_bytes(inputs.bits) / experts.count,
        flops=2 * inputs.shape.expert_parameters * experts.per_token * rows * layers,
        count=run * inputs.hardware.gpus,
        layers=layers,
    )


def streamed_rows(inputs: PlanInputs) -> int:
    """Return the rows of the least pass for which copying a layer's experts takes no longer than the host does."""
    experts, hardware = inputs.shape.experts, inputs.hardware
    assert experts is not None, "only a mixture has experts to copy"
    link_s = inputs.shape.expert_bytes(inputs.bits) / experts.count / hardware.gpus / hardware.link
    copying = experts.count * (link_s if hardware.shared else max(link_s, PAGE_S))

    def is_copied(rows: int) -> bool:
        return copying <= experts_on_host(inputs, rows, 1).seconds(hardware)

    return 1 + bisect_left(range(1, _MOST_ROWS), True, key=is_copied)


def attention_flops(shape: Dimensions, tokens: int, rows: int) -> float:
    """Return the floating-point operations of attention: two for q . k and two for p . v."""
    return 4.0 * shape.attention_products(tokens) * rows
