"""How much memory there is, and how much a run will take; asked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from .errors import OutOfMemory
from .shape import ModelShape

GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes that a run takes on the device where the model and its KV cache live."""

    weights: int
    kv: int
    kv_tokens: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations


def estimate(shape: ModelShape, tokens: int, chunk: int, itemsize: int) -> MemoryEstimate:
    """What a sequence of `tokens` takes with prefill chunks of `chunk` rows and `itemsize` bytes a number."""
    rows = min(chunk, tokens)
    # The widest moment is the MLP: gate, up, their product and the residual, doubled for the fp32 copies on old CPUs.
    row = 2 * (3 * shape.intermediate + 2 * shape.hidden + 3 * shape.heads * shape.head_dim) * max(itemsize, 4)
    widest = 2 * shape.intermediate * shape.hidden * 4
    rope = 2 * tokens * shape.head_dim * itemsize
    return MemoryEstimate(
        weights=shape.parameters * itemsize,
        kv=shape.kv_bytes(tokens, itemsize),
        kv_tokens=tokens,
        activations=rows * row + widest + rope + 4 * 4 * shape.vocab,
    )


def available(device: torch.device) -> int:
    """Free bytes on a device; for the CPU within the control group that the process runs in (a container's limit)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no such group, or the word "max"
        return free
    return min(free, max(limit - used, 0))


def check_fit(need: MemoryEstimate, free: int) -> None:
    """Raises OutOfMemory with all the numbers when `need` exceeds `free` bytes."""
    if need.total <= free:
        return
    parts = f"weights {need.weights / GIB:.2f}, KV cache of {need.kv_tokens:,} tokens {need.kv / GIB:.2f}"
    raise OutOfMemory(
        f"not enough memory: about {need.total / GIB:.2f} GiB needed ({parts}, "
        f"activations {need.activations / GIB:.2f}), {free / GIB:.2f} GiB free",
        "use a shorter prompt, fewer --max-new-tokens, --dtype bfloat16 or a smaller model",
    )
