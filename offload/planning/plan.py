"""Plans: from a model's dimensions, a sequence length and the hardware to a placement, a method and its latency.

Nothing is loaded or measured here; the same inputs always give the same plan. Imports no torch.
"""

from dataclasses import dataclass, replace

from ..errors import OutOfMemory
from ..settings.kv_formats import BF16, PLAIN_KV, tiered_format
from ..settings.method_sizes import drafting_from_planes, has_middle
from ..settings.placement_settings import PLANES
from ..units import counted, size_text
from .inputs import PlanInputs
from .latency import Decoding, candidates, first_token, predict
from .memory import Tier
from .passes import Passes
from .placement import Placed, place, resident_tokens
from .roofline import Time

ANSWER_TOKENS = 512  # of an answer, for which formats are compared: the default of --max-new-tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement and predicted latency for some inputs, which are valid only if it `fits`.

    `inputs` have the format of keys and values, and the draft from planes, that were decided for AUTO. `plain` is
    autoregressive decoding on the same placement; `chosen` is the requested method, for `auto` the fastest.
    """

    inputs: PlanInputs
    placed: Placed
    ttft: Time
    plain: Decoding
    chosen: Decoding

    @property
    def device(self) -> Tier:
        """Return the memory of each GPU; on a CPU, the host's memory."""
        return self.placed.device

    @property
    def host(self) -> Tier:
        """Return the pinned host memory, of all GPUs together."""
        return self.placed.host

    @property
    def disk(self) -> Tier:
        """Return the file on disk for KV that memory has no room for; without parts if there is none."""
        return self.placed.disk

    @property
    def fits(self) -> bool:
        return self.placed.fits

    @property
    def is_whole(self) -> bool:
        """Return whether all weights are on the device, experts included."""
        return self.placed.weight_layers == self.inputs.shape.layers and not self.placed.away_layers

    @property
    def offload(self) -> str:
        """Return how KV that is not resident is attended to: none, stream, host, hybrid or planes."""
        if self.placed.resident_layers == self.inputs.shape.kv_layers:
            return "none"
        share = self.chosen.host_share
        if self.inputs.has_planes:
            return PLANES
        return "stream" if share == 0 else "host" if share == 1 else "hybrid"

    @property
    def host_share(self) -> float:
        """Return the fraction of the KV on the host to which the host attends."""
        return 0.0 if self.offload == "none" else self.chosen.host_share

    @property
    def budget(self) -> int:
        """Return the tokens in the retrieval cache; 0 without one."""
        inputs = self.inputs
        return inputs.budget if has_middle(inputs.speculation, inputs.tokens) else 0

    @property
    def resident_tokens(self) -> int | None:
        """Return how many tokens fit with everything on the device; None where its memory is not known."""
        return resident_tokens(self.inputs)

    @property
    def speedup(self) -> float:
        """Return the speed-up of the chosen method over plain decoding on the same placement."""
        return self.plain.tbt.seconds / self.chosen.tbt.seconds

    @property
    def answer_s(self) -> float:
        """Return the seconds of the prompt and an answer."""
        return self.ttft.seconds + ANSWER_TOKENS * self.chosen.tbt.seconds

    @property
    def tiers(self) -> list[tuple[str, Tier]]:
        """Return the memories with their names in messages."""
        hardware = self.inputs.hardware
        device = "memory" if hardware.shared else "GPU memory" if hardware.gpus == 1 else "memory on each GPU"
        return [(device, self.device), ("host memory", self.host), ("disk", self.disk)]

    def shortage(self) -> str:
        """Return what does not fit, with the numbers; empty if the plan fits."""
        short = [
            f"needs {size_text(tier.total)} of {name} ({tier.listed}) where {size_text(tier.limit)} may be used"
            for name, tier in self.tiers
            if tier.limit is not None and tier.missing
        ]
        fails = "does not fit" if self.inputs.tokens == 1 else "do not fit"
        return f"{counted(self.inputs.tokens, 'token')} {fails}: {' and '.join(short)}" if short else ""

    def require_fit(self, hint: str = "") -> None:
        """Raise OutOfMemory with the numbers if the plan does not fit."""
        if not self.fits:
            raise OutOfMemory(self.shortage(), hint)


def make_plan(inputs: PlanInputs) -> Plan:
    """Place weights and KV cache, decide their format, and predict how fast the run will be."""
    plan = _plan_of(_with_format(inputs))
    if plan.offload == "none" and plan.fits:
        return plan
    packed = _packed_on_device(inputs)
    if packed is not None and not (plan.fits and plan.answer_s <= packed.answer_s):
        return packed
    if plan.offload != PLANES or plan.placed.uses_disk:
        return plan
    return _plan_of(replace(plan.inputs, speculation=drafting_from_planes(plan.inputs.speculation)))


def _plan_of(inputs: PlanInputs) -> Plan:
    placed = place(inputs)
    passes = Passes(inputs, placed)
    plain = predict(passes, "ar")
    decodings = [predict(passes, method) for method in candidates(inputs)]
    chosen = min(decodings, key=lambda decoding: decoding.tbt.seconds)
    return Plan(inputs, placed, first_token(passes), plain, chosen)


def _with_format(inputs: PlanInputs) -> PlanInputs:
    """Return the inputs with a format of keys and values for AUTO: packed, unless all of them stay on the device.

    Only what lies over tiers is packed: if packed ones would all have room on the device, some are planned elsewhere.
    """
    if inputs.kv_format is not PLAIN_KV:
        return inputs
    plain, packed = (replace(inputs, kv=kv) for kv in (BF16, tiered_format(inputs.kv, inputs.packs)))
    judged = (plain,) if inputs.placement.offload == PLANES else (plain, packed)  # who asks for planes packs
    is_divided = packed.kv != BF16 and all(place(format).resident_layers < inputs.shape.kv_layers for format in judged)
    return replace(packed, auto_packed=True) if is_divided else plain


def _packed_on_device(inputs: PlanInputs) -> Plan | None:
    """Return a plan that packs all keys and values on one GPU, if AUTO may, and they fit; else None."""
    is_one = inputs.hardware.gpus == 1 and not inputs.hardware.shared
    kv = tiered_format(inputs.kv, inputs.packs)
    may_pack = inputs.packs_on_device and inputs.kv_format is PLAIN_KV and kv != BF16
    if not (may_pack and is_one and inputs.placement.offload in ("auto", "none")):
        return None
    plan = _plan_of(replace(inputs, kv=kv))
    return plan if plan.offload == "none" and plan.fits else None
