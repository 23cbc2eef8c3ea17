"""What a GPU's processors can read of keys and values, by the instructions of the compiled kernels of attention."""

from __future__ import annotations

from .rates import READ, Hardware

# Bytes that a processor reads a cycle at most, if each instruction takes one: compiled for 9.0, of 32 query rows, by
# scripts/compile_kernels.py (docs/gpu.md). On other architectures they differ by a tenth.
BYTES_A_CYCLE = {"packed": 15.0, "q8": 8.0, "fp8": 6.6, "q4": 4.0}
# Processors and boost clocks of data sheets, of the GPUs whose memories give more than 4 bytes a cycle and processor.
PROCESSORS = {"a100": (108, 1.41e9), "h100": (132, 1.83e9), "h200": (132, 1.83e9), "b200": (148, 1.85e9)}


def read_share(hardware: Hardware, kv: str) -> float:
    """Return the share of a GPU's read rate at which attention reads keys and values in a format: 1 if memory binds."""
    if kv not in BYTES_A_CYCLE or hardware.name not in PROCESSORS:
        return 1.0
    processors, clock = PROCESSORS[hardware.name]
    return min(1.0, BYTES_A_CYCLE[kv] * processors * clock / (READ * hardware.bandwidth))
