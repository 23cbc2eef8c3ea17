"""From how many rows on a pass copies experts in host memory to the device sooner than the host computes them."""

from bisect import bisect_left
from dataclasses import replace

from .request import PlanRequest
from .roofline import PAGE_S, Pass, hosted_experts_time

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
