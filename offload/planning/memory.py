"""How much memory there is, and how much a run will take; asked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from ..architecture.config import ModelShape
from ..architecture.footprint import activation_bytes
from ..errors import OutOfMemory
from ..units import counted, size_text


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


def check_fit(need: MemoryEstimate, free: int) -> None:
    """Raises OutOfMemory with all the numbers when `need` exceeds `free` bytes."""
    if need.total <= free:
        return
    others = ((need.retrieval, "retrieval cache"), (need.draft, "draft model"))
    more = "".join(f"{name} {size_text(size)}, " for size, name in others if size)
    parts = f"weights {size_text(need.weights)}, KV cache of {counted(need.kv_tokens, 'token')} {size_text(need.kv)}"
    raise OutOfMemory(
        f"not enough memory: about {size_text(need.total)} needed ({parts}, "
        f"{more}activations {size_text(need.activations)}), {size_text(free)} may be used",
        "use a shorter prompt, fewer --max-new-tokens, a smaller --prefill-chunk, --dtype bfloat16 or a smaller model",
    )
