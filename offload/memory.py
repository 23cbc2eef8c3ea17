"""How much memory there is, and how much a run will take; asked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from .config import GIB
from .errors import OutOfMemory
from .parts import activation_bytes
from .shape import ModelShape

_CGROUP = Path("/sys/fs/cgroup")
_GROUP_FILES = (  # limit, use and statistics of a control group, version 2 and version 1
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes that a run takes on the device where the model and its KV cache live."""

    weights: int
    kv: int
    kv_tokens: int
    activations: int
    retrieval: int = 0  # selected KV and mean keys
    draft: int = 0  # a draft model's weights and cache

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.retrieval + self.draft


def estimate(shape: ModelShape, tokens: int, chunk: int, itemsize: int) -> MemoryEstimate:
    """What a sequence of `tokens` takes with prefill chunks of `chunk` rows and `itemsize` bytes a number."""
    return MemoryEstimate(
        weights=shape.parameters * itemsize,
        kv=shape.kv_bytes(tokens, itemsize),
        kv_tokens=tokens,
        activations=activation_bytes(shape, tokens, chunk, itemsize),
    )


def available(device: torch.device) -> int:
    """Free bytes on a device; for the CPU within the control group that the process runs in (a container's limit)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([psutil.virtual_memory().available, *_free_in_groups(_CGROUP)])


def _free_in_groups(root: Path) -> Iterator[int]:
    """Bytes left under each memory limit that a container sets; file pages that can be dropped count as free."""
    for limit, used, statistics, droppable in _GROUP_FILES:
        try:
            numbers = [int((root / name).read_text()) for name in (limit, used)]
            rows = dict(line.split() for line in (root / statistics).read_text().splitlines())
            yield max(numbers[0] - numbers[1] + int(rows.get(droppable, 0)), 0)
        except (OSError, ValueError):  # no such group, or the word "max"
            continue


def check_fit(need: MemoryEstimate, free: int) -> None:
    """Raises OutOfMemory with all the numbers when `need` exceeds `free` bytes."""
    if need.total <= free:
        return
    others = ((need.retrieval, "retrieval cache"), (need.draft, "draft model"))
    more = "".join(f"{name} {size / GIB:.2f}, " for size, name in others if size)
    parts = f"weights {need.weights / GIB:.2f}, KV cache of {need.kv_tokens:,} tokens {need.kv / GIB:.2f}"
    raise OutOfMemory(
        f"not enough memory: about {need.total / GIB:.2f} GiB needed ({parts}, "
        f"{more}activations {need.activations / GIB:.2f}), {free / GIB:.2f} GiB free",
        "use a shorter prompt, fewer --max-new-tokens, --dtype bfloat16 or a smaller model",
    )
