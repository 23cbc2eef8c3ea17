"""From a model's shape, a context and the hardware to a plan: what lies where, how to decode, and how fast it will be.

Nothing is loaded or measured here; the same request always gives the same plan. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import OutOfMemory
from ..levels import has_middle
from ..units import counted, size_text
from .latency import Decoding, Passes, candidates, prefill
from .placement import Placed, PlanRequest, Tier, place
from .roofline import Time


@dataclass(frozen=True, slots=True)
class Plan:
    """The placement of a request, and its predictions; they hold only if it `fits`.

    `plain` is decoding token by token on the same placement, `chosen` the method asked for, or the fastest for `auto`.
    """

    request: PlanRequest
    placed: Placed
    ttft: Time
    plain: Decoding
    chosen: Decoding

    @property
    def device(self) -> Tier:
        """Of each GPU; on a CPU, of the whole."""
        return self.placed.device

    @property
    def host(self) -> Tier:
        """Pinned host memory, for all GPUs together."""
        return self.placed.host

    @property
    def fits(self) -> bool:
        return self.placed.fits

    @property
    def offload(self) -> str:
        """none, stream, host or hybrid: how KV that is not resident is attended to."""
        if self.placed.resident_layers == self.request.shape.layers:
            return "none"
        share = self.chosen.host_share
        return "stream" if share == 0 else "host" if share == 1 else "hybrid"

    @property
    def host_share(self) -> float:
        """The part of the KV on the host that is attended to there."""
        return 0.0 if self.offload == "none" else self.chosen.host_share

    @property
    def budget(self) -> int:
        """Tokens in the retrieval cache; 0 where there is none."""
        request = self.request
        return min(request.speculation.budget, request.tokens) if has_middle(request.speculation, request.tokens) else 0

    @property
    def speedup(self) -> float:
        """Of the method over plain decoding on the same placement."""
        return self.plain.tbt.seconds / self.chosen.tbt.seconds

    def shortage(self) -> str:
        """What is missing, with the numbers; empty if it fits."""
        short = [
            f"needs {size_text(tier.total)} of {name} ({_listed(tier)}) where {size_text(tier.limit)} may be used"
            for tier, name in ((self.device, self.device_name), (self.host, "host memory"))
            if tier.missing
        ]
        tokens = self.request.tokens
        fails = "does not fit" if tokens == 1 else "do not fit"
        return f"{counted(tokens, 'token')} {fails}: {' and '.join(short)}" if short else ""

    @property
    def device_name(self) -> str:
        """What the device tier is called."""
        hardware = self.request.hardware
        return "memory" if hardware.shared else "GPU memory" if hardware.gpus == 1 else "memory on each GPU"

    def require_fit(self, hint: str = "") -> None:
        """Raises OutOfMemory with the numbers if it does not fit."""
        if not self.fits:
            raise OutOfMemory(self.shortage(), hint)


def _listed(tier: Tier) -> str:
    return ", ".join(f"{name} {size_text(size)}" for name, size in tier.parts.items())


def make_plan(request: PlanRequest) -> Plan:
    """Place a request and predict how fast it will be."""
    placed = place(request)
    passes = Passes(request, placed)
    plain = passes.decode("ar")
    ways = [passes.decode(method) for method in candidates(request)]
    chosen = min(ways, key=lambda way: way.tbt.seconds)
    return Plan(request, placed, prefill(passes), plain, chosen)


def suggested_budget(tokens: int) -> int:
    """Tokens of a retrieval cache for a context: 3 %, as in the paper, in powers of two; 1,024 at least."""
    return max(1024, 2 ** ((tokens // 32) - 1).bit_length() if tokens >= 64 else 1024)
