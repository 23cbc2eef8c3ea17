"""What the experts cost that a pass reads of layers whose experts are in host memory, for each way to run them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..hardware.rates import READ
from .pass_work import with_experts_away
from .placement import Placed
from .request import PlanRequest
from .roofline import QUANTIZED_READ, Pass, hosted_experts_time


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
    empty = Pass(tokens * request.sequences, 0, 0, *(0.0,) * 7, graphed=False)
    work = with_experts_away(empty, request, replace(placed, experts="host"))
    size, rate = work.hosted_weights, QUANTIZED_READ if request.is_quantized else READ
    return ExpertTimes(
        tokens=tokens,
        distinct=experts.distinct(work.rows),
        bytes=int(size),
        host_s=hosted_experts_time(work, hardware),
        link_s=size / hardware.gpus / hardware.link,
        device_s=size / hardware.gpus / hardware.bandwidth / rate,
    )
