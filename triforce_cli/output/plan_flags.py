"""The command-line arguments that a plan stands for."""

from __future__ import annotations

from offload.config import Speculation
from offload.planning.plan import Plan
from offload.units import GIB

_SPECULATION = ("method", "draft", "budget", "chunk", "gamma1", "gamma2")


def flags_of(plan: Plan) -> list[str]:
    """Return the arguments of generate, summarize or bench that a plan stands for, without prompt or documents."""
    request, placement, settings = plan.request, plan.request.placement, plan.request.speculation
    # "none" would keep the weights on the device too
    mode = "auto" if plan.offload == "none" and plan.placed.weight_layers < request.shape.layers else plan.offload
    flags = ["--model", request.model, "--profile", request.hardware.name, "--offload", mode]
    if plan.offload != "none":
        flags += ["--resident-layers", str(plan.placed.resident_layers)]
    if plan.offload == "hybrid":
        flags += ["--host-share", f"{plan.host_share:.3f}"]
    for name in ("memory", "host_memory"):
        if (size := getattr(placement, name)) is not None:
            flags += [f"--{name.replace('_', '-')}", f"{size // GIB}GiB" if size % GIB == 0 else str(size)]
    if placement.link_gb_s is not None:
        flags += ["--link", f"{placement.link_gb_s:g}"]
    if request.itemsize == 4:
        flags += ["--dtype", "float32"]
    for name in _SPECULATION:
        if (value := getattr(settings, name)) != Speculation.__dataclass_fields__[name].default:
            flags += [f"--{name}", str(value)]
    return [*flags, "--prefill-chunk", str(request.prefill_chunk)]
