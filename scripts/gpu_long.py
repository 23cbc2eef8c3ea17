"""Measure step times of a 7B model's shape at 128K tokens, or of the largest part that fits the machine."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import torch
from gpu_models import filled_cache, llama, random_model, smaller
from gpu_parts import GIB, Machine, Row, step

from offload.architecture.config import ModelShape
from offload.config import Placement, Speculation
from offload.decoder import Model
from offload.hardware.rates import Hardware
from offload.kernels.native import KernelUnavailable, find_kernel
from offload.kv_cache.full import FullCache
from offload.offloading import TieredStoreFactory, TierSettings
from offload.offloading.balance import Balance
from offload.planning.placement import PlanRequest
from offload.planning.plan import Plan, make_plan
from offload.speculation.hierarchy import selected_cache

BUDGET = 4096


def long_context(machine: Machine, rows: list[Row]) -> dict:
    """Measure step times of Llama-2-7B's shape at 128K, reduced until it fits this machine's memory."""
    gc.collect()
    shape = llama(4, 64, 2, 128, 512, 8192) if machine.small else llama(32, 4096, 32, 11008, 32000, 131072)
    shape, tokens, plan, cut = _fitting(machine, shape, 3000 if machine.small else 131072)
    if not machine.small:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(machine.device)
    model = random_model(shape, machine.dtype, machine.device)
    settings = TierSettings("hybrid", resident_layers=min(plan.placed.resident_layers, shape.layers - 1))
    cache = filled_cache(model, TieredStoreFactory(model.operations, machine.device, settings, machine.link()), tokens)
    size = f"{shape.layers} layers of {shape.hidden}, {tokens:,} tokens{cut}"
    where = f"{cache.store.tiers.resident_layers} layers resident of a {plan.device.limit / GIB:.1f} GiB cap"
    rows.append(("placement", where, size))
    steps: dict[str, float] = {}
    for name, run in _contenders(machine, model, cache):
        steps[name] = run()
        rows.append((name, f"{1e3 * steps[name]:.1f} ms a step", ""))
        if name == "streaming":
            rows.append(_memory(machine, plan))
    if "hybrid" not in steps:
        rows.append(("hybrid", "skipped", "the native kernel is not built"))
    return {"shape": size, "placement": where, "steps_s": steps}


def _contenders(machine: Machine, model: Model, cache: FullCache) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield (name, function that returns seconds per step) for streaming, hybrid and the retrieval level."""
    tiers = cache.store.tiers

    def full(share: float | None, warm: int) -> float:
        tiers.balance = Balance(share)
        return machine.seconds(lambda: step(model, cache), 3, warm)

    yield "streaming", lambda: full(0.0, 1)
    try:
        find_kernel()
        yield "hybrid", lambda: full(None, 4)
    except KernelUnavailable:
        pass
    # The most recent chunks instead of the highest-scoring ones: a step takes as long, without the selection.
    selected = selected_cache(cache, Speculation("streaming", budget=256 if machine.small else BUDGET))

    def retrieval() -> float:
        selected.adopt()
        return machine.seconds(lambda: step(model, selected), 10, 3)

    yield f"retrieval level, budget {256 if machine.small else BUDGET}", retrieval


def _memory(machine: Machine, plan: Plan) -> Row:
    """Return the peak device memory beside the planned one."""
    planned, spare = plan.device.total, plan.device.parts.get("activations", 0)
    remark = f"planned {planned / GIB:.2f} GiB, of which {spare / GIB:.2f} for prefill, which did not run"
    if machine.small:
        return ("peak memory", "not measured on a CPU", remark)
    free, total = torch.cuda.mem_get_info(machine.device)
    peak = torch.cuda.max_memory_allocated(machine.device)
    return ("peak memory", f"{peak / GIB:.2f} GiB, {(total - free) / GIB:.2f} with the driver's", remark)


def _fitting(machine: Machine, shape: ModelShape, tokens: int) -> tuple[ModelShape, int, Plan, str]:
    """Halve tokens and layers until the model fits; return (shape, tokens, plan, remark on the reduction)."""
    asked = (shape.layers, tokens)
    cap = 24 * GIB
    if not machine.small:
        cap = min(cap, int(0.9 * torch.cuda.mem_get_info(machine.device)[0]))
    while True:
        plan = make_plan(_request(machine, shape, tokens, cap))
        away = shape.layers - plan.placed.resident_layers
        weights = plan.placed.weight_layers == shape.layers and not plan.device.missing
        if weights and away * shape.layer_kv_bytes(tokens + 1024, machine.dtype.itemsize) < 0.7 * free_memory():
            break
        if weights and tokens > 8192:
            tokens //= 2
        elif shape.layers > 1:
            shape = smaller(shape)
        else:
            raise RuntimeError(f"not even one layer of {tokens:,} tokens fits: {plan.shortage()}")
    cut = "" if asked == (shape.layers, tokens) else f" (memory here is too small for {asked[0]} and {asked[1]:,})"
    return shape, tokens, plan, cut


def _request(machine: Machine, shape: ModelShape, tokens: int, cap: int) -> PlanRequest:
    """Return a plan request with arbitrary rates: only the placement is used."""
    rates = {
        "bandwidth": 1e12,
        "flops": 1e14,
        "link": machine.rate or 1e10,
        "host_bandwidth": 1e11,
        "host_flops": 1e12,
    }
    kind = "cpu" if machine.small else "cuda"
    hardware = Hardware("here", kind, 1, cap, host_memory=None, **rates)
    placement = Placement("stream", memory=cap, resident_layers=1 if machine.small else None)
    return PlanRequest("random", shape, tokens, hardware, placement, Speculation("ar"), 512, machine.dtype.itemsize)


def free_memory() -> int:
    """Return the free bytes of host memory."""
    try:
        from offload.system import free_host_memory
    except ImportError:  # without psutil
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free_host_memory()
