"""Roofline model of a forward pass: bytes divided by bandwidths, operations divided by rates.

Work that overlaps takes as long as its slowest part; dependent work adds up. Kernels reach a fraction of the data
sheet's rates: the fractions below are the same for every machine, model and method.
"""

from dataclasses import dataclass

from ..hardware.rates import READ, Hardware, read_share
from ..settings.kv_formats import BF16, KV_FORMATS

# Quantised weights: the share of the bandwidth at which a GPU reads them. gpt-fast decodes on an A100 (its README) with
# 4 bits in groups of 32, 5 bits a weight: Llama-2-7B at 196.8 tokens/s, Llama-2-70B at 25.25. Without LAYER_S that is
# 4.1 GB in 3.3 ms, and 43 GB in 35 ms: 0.61 and 0.60 of 2,039 GB/s.
QUANTIZED_READ = 0.6
# Prefill: cuBLAS and FlashAttention-2 on an A100 reach 60 to 75 % of the dense rate (arXiv 2307.08691, section 4).
COMPUTE = 0.6
# Launches and ramp-ups of the ten or so kernels of a layer in a CUDA graph. gpt-fast decodes Llama-2-7B on an A100 at
# 104.9 tokens/s (its README): 9.5 ms, of which reading the weights at READ takes 7.8, and 32 layers the rest.
LAYER_S = {"cuda": 55e-6, "cpu": 70e-6}  # on a CPU: norms, RoPE and residuals of SmolLM2 measured at 2 ms in 30 layers
# Sampling from logits, or a verification: some ten small eager kernels, and a value for which the host waits.
SAMPLE_S = {"cuda": 0.12e-3, "cpu": 0.3e-3}
# An eager operation of PyTorch: its dispatch in Python and C++, and the launch. 5 to 10 us on desktop CPUs.
LAUNCH_S = 7e-6
# Of a layer without a graph, with Triton: norms, linears, storing, attention, gate. Without it there are 21. These and
# the next three are counted on fake tensors by tests/memory/test_gpu_launches.py.
LAUNCHES = 10
AWAY_LAUNCHES = 17  # more, of a layer whose keys and values are offloaded: RoPE, and storing in pages, by torch
REDUCED_LAUNCHES = 4  # more, of a layer that several GPUs share: two all-reduces, and what adds their sums
EXPERT_LAUNCHES = 6  # of an expert that runs: its two products, and its part of the routing (experts.py)
# An expert that runs on a CPU: calls of two products, and its part of the routing. Of 64 x 32 numbers, 8 for one token
# took 45 us of CPU time each, 53 for 8 tokens 20 us.
EXPERT_S = 30e-6
# A page that is streamed: taken from the ring, attended to and released, in Python; about three calls of the driver for
# its copy and its events, and one launch. An estimate: nothing was measured on a GPU.
PAGE_S = 60e-6
# An expert of two linears that is unpacked where it has arrived takes a few launches more, as pages: to be transposed,
# or with quantised weights to have codes and scales taken apart, some 40. Estimates too.
ARRANGED_PAGES = {False: 2, True: 6}
PAGE_ATTENTION_S = 15e-6  # of it: the launch of the attention. The rest is that of a copy, which may have several pages
# A layer to which the host attends too: the queries go down, the device waits, one sum comes up. Likewise.
FOLD_S = 150e-6
# NCCL's latency for a few kilobytes between two cards that talk over PCIe through the host.
ALL_REDUCE_S = 30e-6


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds, the resource that bounds them, and the seconds that each resource alone would take."""

    seconds: float
    bound: str
    resources: dict[str, float]


@dataclass(frozen=True, slots=True)
class HostedExperts:
    """The experts that the host runs in a pass: their bytes, operations and number, and the number of their layers."""

    weights: float = 0.0
    flops: float = 0.0
    count: float = 0.0
    layers: int = 0

    def seconds(self, hardware: Hardware) -> float:
        """Return the time for which the device waits: rows go down, and sums come up.

        The host is one for all devices, whose shares of the experts it runs one after the other.
        """
        reading = self.weights / hardware.host_bandwidth / READ
        multiplying = self.flops / hardware.host_flops / COMPUTE
        folding = 0.0 if hardware.shared else self.layers * FOLD_S
        return max(reading, multiplying) + self.count * EXPERT_S + folding


@dataclass(frozen=True, slots=True)
class Pass:
    """The work of a pass over `rows` tokens on each device, in bytes and operations.

    Attributes:
        row_bytes: of one row between layers.
        weights, kv: bytes that are read from device memory, resident or just copied.
        copied: bytes of both that come over the link.
        hosted, hosted_flops: the KV in bytes to which the one host attends, and its operations.
        graphed: whether it is launched at once; otherwise operation by operation.
        pages: streamed one after the other.
        folded_layers: layers in which the host attends too.
        away_layers: layers whose keys and values are offloaded.
        quantized: whether the weights are quantised, on a GPU.
        disk: KV in bytes that is read from disk.
        kv_format: the format of the keys and values that attention reads.
        experts: how many run on the device, of all layers together.
        hosted_experts: those that the host runs.
    """

    rows: int
    layers: int = 0
    row_bytes: int = 0
    weights: float = 0.0
    kv: float = 0.0
    copied: float = 0.0
    hosted: float = 0.0
    linear_flops: float = 0.0
    attention_flops: float = 0.0
    hosted_flops: float = 0.0
    graphed: bool = True
    pages: float = 0.0
    folded_layers: int = 0
    away_layers: int = 0
    quantized: bool = False
    disk: float = 0.0
    kv_format: str = BF16
    experts: float = 0.0
    hosted_experts: HostedExperts = HostedExperts()


def pass_time(work: Pass, hardware: Hardware) -> Time:
    """Return the time of a pass. Copies are prefetched across layers, and host and device attend at the same time.

    A layer's attention depends on its queries, and the next layer on that attention.
    """
    reading = work.weights / hardware.bandwidth / (QUANTIZED_READ if work.quantized else READ)
    multiplying = work.linear_flops / hardware.flops / COMPUTE
    converting = KV_FORMATS[work.kv_format].rate  # on a CPU; a GPU's arithmetic may be slower than its memory
    kv_rate = converting if hardware.shared else read_share(hardware, work.kv_format)
    attending = work.kv / hardware.bandwidth / READ / kv_rate
    scoring = work.attention_flops / hardware.flops / COMPUTE
    hosted = work.hosted / hardware.host_bandwidth / READ / converting
    host_scoring = work.hosted_flops / (hardware.host_flops * COMPUTE if hardware.shared else hardware.host_attention)
    folding = 0.0 if hardware.shared else work.folded_layers * FOLD_S
    latency = work.layers * LAYER_S[hardware.device] + folding + _all_reduces(work, hardware)
    latency += work.experts * EXPERT_S if hardware.shared else 0.0
    # What is attended to on the host of a GPU is read once, and its rows are computed page by page: these times add up.
    device, host = max(attending, scoring), (max if hardware.shared else sum)((hosted, host_scoring))
    both = device + host if hardware.shared else max(device, host)  # the same cores cannot do both at once
    computing = max(reading, multiplying) + both + latency
    on_host = work.hosted_experts
    reading_experts = on_host.weights / hardware.host_bandwidth / READ
    bus = (work.copied * hardware.gpus + work.hosted + on_host.weights) / hardware.host_bandwidth / READ
    resources = {
        "link": work.copied / hardware.link,
        "device memory": reading + attending,
        "compute": multiplying + scoring,
        "host memory": max(hosted + reading_experts, bus),
        "host compute": host_scoring + on_host.flops / hardware.host_flops / COMPUTE,
        "latency": latency,
        "launches": _launching(work, hardware),
    }
    if work.disk:
        resources["disk"] = work.disk / hardware.disk_rate
    waiting = on_host.seconds(hardware)  # for experts, layer by layer
    working = max(computing, resources["launches"]) + waiting
    seconds = max(resources["link"], working, bus, resources.get("disk", 0.0))
    return Time(seconds, max(resources, key=resources.__getitem__), resources)


def quantized_rows(rows: int) -> int:
    """Return the rows whose multiplication takes as long as that of `rows` with quantised weights on a GPU.

    They are filled up to a tile of 16, 32 or 64, and multiplied twice: with the codes, and with ones for the minima.
    """
    return 2 * max(16, 1 << (rows - 1).bit_length())


def _launching(work: Pass, hardware: Hardware) -> float:
    """Return the seconds in which the thread that launches a GPU's work runs Python and the driver.

    The GPU works meanwhile, and waits for it only if that takes longer. On a CPU they are part of LAYER_S.
    """
    if hardware.shared:
        return 0.0
    launches = work.layers * layer_launches(hardware) + work.experts * EXPERT_LAUNCHES
    launches += work.away_layers * AWAY_LAUNCHES
    return (0.0 if work.graphed else launches * LAUNCH_S) + work.pages * PAGE_S


def layer_launches(hardware: Hardware) -> int:
    """Return the kernel launches of one resident layer, outside CUDA graphs."""
    return LAUNCHES + (REDUCED_LAUNCHES if hardware.gpus > 1 else 0)


def _all_reduces(work: Pass, hardware: Hardware) -> float:
    """Return the seconds of the all-reduces: after the attention and after the MLP of each layer."""
    if hardware.gpus == 1:
        return 0.0
    return 2 * work.layers * (ALL_REDUCE_S + work.rows * work.row_bytes / hardware.link)
