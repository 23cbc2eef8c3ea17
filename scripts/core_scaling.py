"""Print what plans expect of many cores: ms a token of Llama-3.1-8B in 4 bits, plain decoding, at 8K / 32K tokens.

Machines are described by cores and by the peak of their memory's channels, in GB/s. Nothing is measured here.
"""

from __future__ import annotations

from dataclasses import replace

from offload.architecture.known_models import KNOWN
from offload.architecture.weight_formats import rounded_bits
from offload.hardware import profiles
from offload.hardware.rates import describe, on_threads
from offload.planning.plan import make_plan
from offload.planning.request import PlanRequest
from offload.settings.config import Speculation

MODEL, TOKENS = "Llama-3.1-8B", (8192, 32768)
THREADS = (1, 4, 8, 16, 32, 64)
MACHINES = {  # cores, GB/s
    "desktop, 8 cores, 2 channels of DDR5-5600": (8, 89.6),
    "workstation, 32 cores, 8 channels of DDR5-4800": (32, 307.2),
    "server, 2 x 64 cores, 24 channels of DDR5-4800, weights and cache on one node": (128, 460.8),
    "the same, interleaved over both nodes": (128, 921.6),
}


def milliseconds(cores: int, gb_s: float, threads: int, tokens: int) -> float:
    """Return the time between tokens that a plan predicts with so many threads."""
    host = profiles.Host(memory_gib=256, bandwidth_gb_s=gb_s, bf16_gflops=100.0 * cores, cores=cores)
    hardware = on_threads(describe(replace(profiles.load("cpu"), host=host)), threads)
    shape = KNOWN[MODEL]
    plan = make_plan(
        PlanRequest(
            MODEL,
            shape,
            tokens,
            hardware,
            speculation=Speculation(method="ar"),
            weight_bits=rounded_bits(shape, "q4"),
            quantize="q4",
        )
    )
    return 1e3 * plan.plain.tbt.seconds


if __name__ == "__main__":
    print(f"| machine | 1 thread | {' | '.join(map(str, THREADS[1:]))} |")
    print(f"| --- |{' ---: |' * len(THREADS)}")
    for name, (cores, gb_s) in MACHINES.items():
        cells = [
            " / ".join(f"{milliseconds(cores, gb_s, threads, tokens):.0f}" for tokens in TOKENS)
            if threads <= cores
            else ""
            for threads in THREADS
        ]
        print(f"| {name} | {' | '.join(cells)} |")
