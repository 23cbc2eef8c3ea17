"""Plans: from a model's dimensions, a sequence length and the hardware to a placement, a method and its latency.

Nothing is loaded or measured here; the same request always gives the same plan. Imports no torch.
"""

from dataclasses import dataclass, replace

from ..errors import OutOfMemory
from ..settings.kv_formats import BF16, PACKED_KV, PLAIN_KV, tiered_format
from ..settings.method_sizes import drafting_from_planes, has_middle
from ..settings.placement_settings import PLANES
from ..units import counted, size_text
from .expert_times import ExpertTimes, expert_times
from .first_token import first_token
from .latency import Decoding, candidates, predict
from .passes import Passes
from .placement import Placed, Tier, place, placements, resident_tokens
from .request import PlanRequest
from .roofline import Time


@dataclass(frozen=True, slots=True)
class Plan:
    """A request's placement and predicted latency, which are valid only if it `fits`.

    `plain` is autoregressive decoding on the same placement; `chosen` is the requested method, for `auto` the fastest.
    """

    request: PlanRequest
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
    def offload(self) -> str:
        """Return how KV that is not resident is attended to: none, stream, host or hybrid."""
        if self.placed.resident_layers == self.request.shape.kv_layers:
            return "none"
        share = self.chosen.host_share
        if self.request.has_planes:
            return PLANES
        return "stream" if share == 0 else "host" if share == 1 else "hybrid"

    @property
    def host_share(self) -> float:
        """Return the fraction of the KV on the host to which the host attends."""
        return 0.0 if self.offload == "none" else self.chosen.host_share

    @property
    def expert_times(self) -> tuple[ExpertTimes, ...]:
        """Return what experts in host memory cost a plain step, and a verification if there is one; () if none are."""
        rows = dict.fromkeys((1, self.chosen.gamma2 + 1))
        away = self.placed.away_layers
        return tuple(expert_times(self.request, away, each) for each in rows) if away else ()

    @property
    def budget(self) -> int:
        """Return the tokens in the retrieval cache; 0 without one."""
        request = self.request
        return request.budget if has_middle(request.speculation, request.tokens) else 0

    @property
    def resident_tokens(self) -> int | None:
        """Return how many tokens fit with everything on the device; None where its memory is not known."""
        return resident_tokens(self.request)

    @property
    def speedup(self) -> float:
        """Return the speed-up of the chosen method over plain decoding on the same placement."""
        return self.plain.tbt.seconds / self.chosen.tbt.seconds

    def shortage(self) -> str:
        """Return what does not fit, with the numbers; empty if the plan fits."""
        short = [
            f"needs {size_text(tier.total)} of {name} ({_listed(tier)}) where {size_text(tier.limit)} may be used"
            for tier, name in ((self.device, self.device_name), (self.host, "host memory"), (self.disk, "disk"))
            if tier.missing
        ]
        tokens, sequences = self.request.tokens, self.request.sequences
        what = counted(tokens, "token") if sequences == 1 else f"{sequences:,} sequences of {counted(tokens, 'token')}"
        fails = "does not fit" if tokens == sequences == 1 else "do not fit"
        return f"{what} {fails}: {' and '.join(short)}" if short else ""

    @property
    def device_name(self) -> str:
        """Return the device tier's name in messages."""
        hardware = self.request.hardware
        return "memory" if hardware.shared else "GPU memory" if hardware.gpus == 1 else "memory on each GPU"

    def require_fit(self, hint: str = "") -> None:
        """Raise OutOfMemory with the numbers if the plan does not fit."""
        if not self.fits:
            raise OutOfMemory(self.shortage(), hint)


def _listed(tier: Tier) -> str:
    return ", ".join(f"{name} {size_text(size)}" for name, size in tier.parts.items())


# How many times as fast as others planes must be that nobody has asked for: which drafts are accepted is a guess.
CLEARLY = 1.2
ANSWER_TOKENS = 512  # of an answer, for which placements are compared: the default of --max-new-tokens


def make_plan(request: PlanRequest) -> Plan:
    """Place a request and predict how fast it will be.

    Where experts may run in several ways, it is the one with which the prompt and an answer take least time.
    """
    alone = _packed_on_device(request)
    request = _with_format(request)
    best = _best_plan(request)
    if alone is not None and not (best.offload == "none" and best.fits):
        packed = _best_plan(alone)
        if packed.offload == "none" and packed.fits and not (best.fits and _seconds(best) <= _seconds(packed)):
            return packed
    if best.offload == "none" or best.placed.uses_disk:
        return best
    if request.has_planes:
        return _best_plan(_drafting_from_planes(request))
    if not _may_have_planes(request):
        return best
    planes = _best_plan(_drafting_from_planes(request))
    is_clear = best.chosen.tbt.seconds > CLEARLY * planes.chosen.tbt.seconds
    return planes if planes.fits and planes.offload == PLANES and is_clear else best


def _best_plan(request: PlanRequest) -> Plan:
    plans = (_plan_of(request, placed) for placed in placements(request))
    return min(plans, key=_seconds)


def _seconds(plan: Plan) -> float:
    """Return the seconds of the prompt and an answer."""
    return plan.ttft.seconds + ANSWER_TOKENS * plan.chosen.tbt.seconds


def _packed_on_device(request: PlanRequest) -> PlanRequest | None:
    """Return the request with packed keys and values that all stay on one GPU, if AUTO may pack them there."""
    packed = replace(request, kv=tiered_format(request.kv, request.packs))
    is_one = request.hardware.gpus == 1 and not request.hardware.shared and request.sequences == 1
    may_pack = request.packs_on_device and request.kv_format is PLAIN_KV and packed.kv != BF16
    return packed if may_pack and is_one and request.placement.offload in ("auto", "none") else None


def _may_have_planes(request: PlanRequest) -> bool:
    """Return whether planes may be chosen: on a GPU that has all weights, where nothing else was asked for."""
    placement, settings = request.placement, request.speculation
    asked = placement.offload != "auto" or placement.host_share is not None or settings.middle is not None
    return not asked and not request.hardware.shared and request.kv_format is PACKED_KV and request.sequences == 1


def _drafting_from_planes(request: PlanRequest) -> PlanRequest:
    placement = replace(request.placement, offload=PLANES)
    return replace(request, placement=placement, speculation=drafting_from_planes(request.speculation))


def _with_format(request: PlanRequest) -> PlanRequest:
    """Return the request with a format of keys and values for AUTO: packed, unless all of them stay on the device.

    Only what lies over tiers is packed: if packed ones would all have room on the device, some are planned elsewhere.
    """
    if request.kv_format is not PLAIN_KV:
        return request
    plain, packed = (replace(request, kv=kv) for kv in (BF16, tiered_format(request.kv, request.packs)))
    judged = (plain,) if request.placement.offload == PLANES else (plain, packed)  # who asks for planes packs
    is_divided = packed.kv != BF16 and all(place(each).resident_layers < request.shape.kv_layers for each in judged)
    return replace(packed, packs_tiers_alone=True) if is_divided else plain


def _plan_of(request: PlanRequest, placed: Placed) -> Plan:
    passes = Passes(request, placed)
    plain = predict(passes, "ar")
    decodings = [predict(passes, method) for method in candidates(request)]
    chosen = min(decodings, key=lambda decoding: decoding.tbt.seconds)
    return Plan(request, placed, first_token(passes), plain, chosen)
