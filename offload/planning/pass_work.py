"""The work of one pass: the bytes that its linears read, the operations of linears and attention, and experts away."""

from dataclasses import dataclass, replace

from ..architecture.dims import Dimensions
from ..architecture.parameters import WeightBits
from ..hardware.rates import READ
from .expert_times import empty_pass, on_host
from .placement import Placed
from .request import PlanRequest
from .roofline import ARRANGED_PAGES, QUANTIZED_READ, Pass, hosted_experts_time, quantized_rows


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


@dataclass(frozen=True, slots=True)
class ExpertTimes:
    """The experts that `tokens` tokens together are expected to read in layers that have them in host memory.

    `distinct` are those of a layer, and `bytes` those of all such layers. `host_s` are the seconds to run them on the
    host, `link_s` to copy them to the device, and `device_s` to read them there, where they have no room.
    """

    tokens: int
    distinct: float
    bytes: int
    host_s: float
    link_s: float
    device_s: float


def expert_times(request: PlanRequest, placed: Placed, tokens: int) -> ExpertTimes | None:
    """Return the times for a pass over `tokens` of each sequence; None if all experts are with the other weights."""
    if not placed.away_layers:
        return None
    hardware, experts = request.hardware, request.shape.experts
    assert experts is not None, "layers without experts have none away"
    work = on_host(request, empty_pass(tokens * request.sequences), placed.away_layers)
    size, rate = work.hosted_weights, QUANTIZED_READ if request.is_quantized else READ
    return ExpertTimes(
        tokens=tokens,
        distinct=experts.distinct(work.rows),
        bytes=int(size),
        host_s=hosted_experts_time(work, hardware),
        link_s=size / hardware.gpus / hardware.link,
        device_s=size / hardware.gpus / hardware.bandwidth / rate,
    )
