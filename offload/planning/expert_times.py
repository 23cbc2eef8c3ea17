"""Experts in host memory: what a pass with them takes on the host, and from how many rows on it copies them."""

from bisect import bisect_left
from dataclasses import dataclass, replace

from ..hardware.rates import READ
from .request import PlanRequest
from .roofline import PAGE_S, QUANTIZED_READ, Pass, hosted_experts_time

_MOST_ROWS = 1 << 16  # where copying never pays, passes of so many rows do


def empty_pass(rows: int) -> Pass:
    """Return a pass over rows without any work."""
    return Pass(rows, 0, 0, *(0.0,) * 7, graphed=False)


def on_host(request: PlanRequest, work: Pass, layers: int) -> Pass:
    """Return a pass in which the host runs the experts of some layers too."""
    experts = request.shape.experts
    assert experts is not None, "layers without experts have none away"
    run = experts.distinct(work.rows) * layers
    return replace(
        work,
        hosted_weights=run * request.shape.expert_bytes(request.bits) / experts.count,
        hosted_experts=run * request.hardware.gpus,
        hosted_expert_flops=2 * request.shape.expert_parameters * experts.per_token * work.rows * layers,
        hosted_layers=layers,
    )


def streamed_rows(request: PlanRequest) -> int:
    """Return the rows of the least pass for which copying a layer's experts takes no longer than the host does."""
    experts, hardware = request.shape.experts, request.hardware
    assert experts is not None, "only a mixture has experts to copy"
    each = request.shape.expert_bytes(request.bits) / experts.count / hardware.gpus / hardware.link
    copying = experts.count * (each if hardware.shared else max(each, PAGE_S))

    def is_copied(rows: int) -> bool:
        return copying <= hosted_experts_time(on_host(request, empty_pass(rows), 1), hardware)

    return 1 + bisect_left(range(1, _MOST_ROWS), True, key=is_copied)


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


def expert_times(request: PlanRequest, away_layers: int, tokens: int) -> ExpertTimes:
    """Return the times for a pass over `tokens` of each sequence, with the experts of `away_layers` in host memory."""
    hardware, experts = request.hardware, request.shape.experts
    assert experts is not None, "layers without experts have none away"
    work = on_host(request, empty_pass(tokens * request.sequences), away_layers)
    size, rate = work.hosted_weights, QUANTIZED_READ if request.is_quantized else READ
    return ExpertTimes(
        tokens=tokens,
        distinct=experts.distinct(work.rows),
        bytes=int(size),
        host_s=hosted_experts_time(work, hardware),
        link_s=size / hardware.gpus / hardware.link,
        device_s=size / hardware.gpus / hardware.bandwidth / rate,
    )
