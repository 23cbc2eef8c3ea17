"""Roofline model of a forward pass: bytes divided by bandwidths, operations divided by rates.

Work that overlaps takes as long as its slowest part; dependent work adds up. Kernels reach a fraction of the data
sheet's rates: the fractions below are the same for every machine, model and method.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..hardware.rates import READ, Hardware

# Prefill: cuBLAS and FlashAttention-2 on an A100 reach 60 to 75 % of the dense rate (arXiv 2307.08691, section 4).
COMPUTE = 0.6
# Launches and ramp-ups of the ten or so kernels of a layer in a CUDA graph. gpt-fast decodes Llama-2-7B on an A100 at
# 104.9 tokens/s (its README): 9.5 ms, of which reading the weights at READ takes 7.8, and 32 layers the rest.
LAYER_S = {"cuda": 55e-6, "cpu": 70e-6}  # on a CPU: norms, RoPE and residuals of SmolLM2 measured at 2 ms in 30 layers
# Sampling from logits, or a verification: a sort of the vocabulary, some twenty small eager kernels at 7 us or more
# each, and a value for which the host waits.
SAMPLE_S = {"cuda": 0.3e-3, "cpu": 0.3e-3}
# NCCL's latency for a few kilobytes between two cards that talk over PCIe through the host.
ALL_REDUCE_S = 30e-6


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds, the resource that bounds them, and the seconds that each resource alone would take."""

    seconds: float
    bound: str
    resources: dict[str, float]


@dataclass(frozen=True, slots=True)
class Pass:
    """The work of a pass over `rows` tokens on each device, in bytes and operations.

    `weights` and `kv` are the bytes read from device memory, resident or just copied; `copied` bytes of both come over
    the link. `hosted` is the KV in bytes to which the one host attends.
    """

    rows: int
    layers: int
    row_bytes: int  # of one row between layers
    weights: float
    kv: float
    copied: float
    hosted: float
    linear_flops: float
    attention_flops: float
    hosted_flops: float


def pass_time(work: Pass, hardware: Hardware) -> Time:
    """Return the time of a pass. Copies are prefetched across layers, and host and device attend at the same time.

    A layer's attention depends on its queries, and the next layer on that attention.
    """
    reading = work.weights / hardware.bandwidth / READ
    multiplying = work.linear_flops / hardware.flops / COMPUTE
    attending = work.kv / hardware.bandwidth / READ
    scoring = work.attention_flops / hardware.flops / COMPUTE
    hosted = work.hosted / hardware.host_bandwidth / READ
    host_scoring = work.hosted_flops / hardware.host_flops / COMPUTE
    latency = work.layers * LAYER_S[hardware.device] + _all_reduces(work, hardware)
    device, host = max(attending, scoring), max(hosted, host_scoring)
    both = device + host if hardware.shared else max(device, host)  # the same cores cannot do both at once
    computing = max(reading, multiplying) + both + latency
    link = work.copied / hardware.link
    bus = (work.copied * hardware.gpus + work.hosted) / hardware.host_bandwidth / READ
    resources = {
        "link": link,
        "device memory": reading + attending,
        "compute": multiplying + scoring,
        "host memory": max(hosted, bus),
        "host compute": host_scoring,
        "latency": latency,
    }
    seconds = max(link, computing, bus)
    return Time(seconds, max(resources, key=resources.__getitem__), resources)


def _all_reduces(work: Pass, hardware: Hardware) -> float:
    """Return the seconds of the all-reduces: after the attention and after the MLP of each layer."""
    if hardware.gpus == 1:
        return 0.0
    return 2 * work.layers * (ALL_REDUCE_S + work.rows * work.row_bytes / hardware.link)


def overlapped(**resources: float) -> Time:
    """Return the time of work that runs at once: that of its slowest part."""
    named = {name.replace("_", " "): seconds for name, seconds in resources.items()}
    bound = max(named, key=named.__getitem__)
    return Time(named[bound], bound, named)
