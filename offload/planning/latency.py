"""How fast a placement will be: time to the first token, and time between tokens for each method.

Passes are timed by costs.py. Tokens per verification follow from the acceptance rate (Leviathan et al.,
arXiv 2211.17192), level upon level (TriForce, arXiv 2404.11912).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..architecture.dims import Dimensions
from ..config import LONGEST_GAMMA
from ..levels import drafter_kind, has_draft_model, has_middle
from ..methods import CHOSEN, LOOKUP, METHODS
from ..speculation.estimators import expected_tokens
from .placement import Placed, PlanRequest
from .roofline import ALL_REDUCE_S, COMPUTE, SAMPLE_S, Pass, Time, overlapped, pass_time

# Until they are measured. TriForce keeps "above 0.9 even when the temperature is 1.0" with 4K of 122K tokens (its
# project page); of its draft model's tokens (JackFram/llama-68m) the retrieval level accepts about .35.
RETRIEVAL_ACCEPTANCE = 0.9
DRAFT_ACCEPTANCE = 0.35
LOOKUP_ACCEPTANCE = 0.3  # n-gram lookup on summaries of books: it proposes for half of the places, and 60 % is right
SHARES = 64  # steps in which the host's share is searched
EQUAL = 1.01  # times the best time: no prediction can tell them apart, so the shortest draft is taken
NEARLY = 1.05  # times the best time: drafts of such lengths are still worth considering
GAMMAS = range(1, LONGEST_GAMMA + 1)


@dataclass(frozen=True, slots=True)
class Decoding:
    """One way to decode.

    `tbt` is the time between tokens; `host_share` the part of the KV that is not resident which the host attends to;
    gamma1 and gamma2 (0: no such level) are drafted tokens a verification, `gammas` the range of gamma2 worth trying;
    `verify_s` and `draft_s` are seconds of one verification and of all drafting before it.
    """

    method: str
    tbt: Time
    host_share: float
    verify_s: float
    draft_s: float = 0.0
    tokens_per_verification: float = 1.0
    gamma1: int = 0
    gamma2: int = 0
    gammas: tuple[int, int] = (0, 0)


class Passes:
    """The passes of a placed request, each timed once."""

    def __init__(self, request: PlanRequest, placed: Placed) -> None:
        self.request, self.placed = request, placed
        self._sample = SAMPLE_S[request.hardware.device]
        self._full: dict[int, tuple[Time, float]] = {}

    def full(self, rows: int) -> tuple[Time, float]:
        """A pass of the target over the full cache, and the host's share with which it is fastest."""
        if rows not in self._full:
            times = [(pass_time(self._over_all(rows, share), self.request.hardware), share) for share in self._shares()]
            self._full[rows] = min(times, key=lambda pair: pair[0].seconds)
        return self._full[rows]

    def _shares(self) -> list[float]:
        placement = self.request.placement
        if placement.offload == "stream" or self.placed.resident_layers == self.request.shape.layers:
            return [0.0]
        if placement.offload == "host":
            return [1.0]
        return [n / SHARES for n in range(SHARES + 1)] if placement.host_share is None else [placement.host_share]

    def _over_all(self, rows: int, share: float) -> Pass:
        request, shape = self.request, self.request.shape
        kv, gpus = shape.kv_bytes(request.tokens, request.itemsize), request.hardware.gpus
        away = kv * (1 - self.placed.resident_layers / shape.layers)
        hosted = share * away
        scoring = _scoring(shape, request.tokens, rows)
        base = self._linears(rows)
        return replace(
            base,
            kv=(kv - hosted) / gpus,
            copied=base.copied + (away - hosted) / gpus,
            hosted=hosted,
            attention_flops=scoring * (1 - hosted / kv) / gpus,
            hosted_flops=scoring * hosted / kv,
        )

    def _linears(self, rows: int) -> Pass:
        """The target without attention; weights that do not stay come over the link, whatever the cache."""
        request, shape = self.request, self.request.shape
        away = (shape.layers - self.placed.weight_layers) * shape.layer_parameters * request.itemsize
        return _linears(shape, request, rows, request.hardware.gpus, away)

    def retrieval(self, rows: int) -> float:
        """Seconds of a pass of the target over the retrieval cache."""
        request, shape, gpus = self.request, self.request.shape, self.request.hardware.gpus
        budget = min(request.speculation.budget, request.tokens)
        kv, scoring = shape.kv_bytes(budget, request.itemsize), _scoring(shape, budget, rows)
        work = replace(self._linears(rows), kv=kv / gpus, attention_flops=scoring / gpus)
        return pass_time(work, request.hardware).seconds

    def draft_token(self) -> float:
        """Seconds a token of the draft model, of which every device has the whole; lookup's tokens are free."""
        request, settings = self.request, self.request.speculation
        if request.draft is None or not has_draft_model(settings):
            return 0.0
        work = _linears(request.draft, request, 1, 1, 0)
        work = replace(work, kv=request.draft.kv_bytes(settings.sink + settings.window, request.itemsize))
        return pass_time(work, replace(request.hardware, gpus=1)).seconds + self._sample

    def decode(self, method: str) -> Decoding:
        """What a method will bring, with the draft lengths that were asked for, or the best ones."""
        if not METHODS[method].speculates:
            time, share = self.full(1)
            seconds = time.seconds + self._sample
            return Decoding(method, replace(time, seconds=seconds), share, seconds)
        wanted = self.request.speculation.gamma2
        token, gamma1, acceptance = self._proposed_token(method)
        gammas = GAMMAS if wanted is None else (wanted,)
        ways = [self._speculative(method, gamma, gamma1, token, acceptance) for gamma in gammas]
        least = min(way.tbt.seconds for way in ways)
        best = next(way for way in ways if way.tbt.seconds <= EQUAL * least)
        near = [way.gamma2 for way in ways if way.tbt.seconds <= NEARLY * least]
        return replace(best, gammas=(min(near), max(near)))

    def _speculative(self, method: str, gamma2: int, gamma1: int, token: float, acceptance: float) -> Decoding:
        """Nothing overlaps between levels: the link rests while they draft, but for the first page."""
        time, share = self.full(gamma2 + 1)
        drafting, verifying = gamma2 * token, time.seconds + 2 * self._sample
        tokens = expected_tokens(acceptance, gamma2)
        resources = {name: seconds / tokens for name, seconds in time.resources.items()}
        bound = time.bound if verifying >= drafting else "drafting"
        tbt = Time((drafting + verifying) / tokens, bound, resources | {"drafting": drafting / tokens})
        return Decoding(method, tbt, share, verifying, drafting, tokens, gamma1, gamma2)

    def _proposed_token(self, method: str) -> tuple[float, int, float]:
        """Seconds a token that is proposed to the full cache, gamma1 for it, and the acceptance of such tokens."""
        request, settings = self.request, self.request.speculation
        usual = DRAFT_ACCEPTANCE if has_draft_model(settings) else LOOKUP_ACCEPTANCE
        below = usual if request.draft_acceptance is None else request.draft_acceptance
        row = METHODS[method]
        if row.middle is None:
            return (0.0, 0, LOOKUP_ACCEPTANCE) if row.drafter == LOOKUP else (self.draft_token(), 0, below)
        acceptance = RETRIEVAL_ACCEPTANCE if request.acceptance is None else request.acceptance
        if row.drafter is None or settings.draft == "none":
            return self.retrieval(1) + self._sample, 0, acceptance
        each, gammas = self.draft_token(), GAMMAS if settings.gamma1 is None else (settings.gamma1,)
        times = {
            gamma: (gamma * each + self.retrieval(gamma + 1) + 2 * self._sample) / expected_tokens(below, gamma)
            for gamma in gammas
        }
        best = next(gamma for gamma in gammas if times[gamma] <= EQUAL * min(times.values()))
        return times[best], best, acceptance


def _linears(shape: Dimensions, request: PlanRequest, rows: int, gpus: int, away: float) -> Pass:
    """A pass without attention, with `away` bytes of its weights in host memory."""
    return Pass(
        rows=rows,
        layers=shape.layers,
        row_bytes=shape.hidden * request.itemsize,
        weights=shape.read_parameters * request.itemsize / gpus,
        kv=0.0,
        copied=away / gpus,
        hosted=0.0,
        linear_flops=2 * shape.read_parameters * rows / gpus,
        attention_flops=0.0,
        hosted_flops=0.0,
    )


def _scoring(shape: Dimensions, tokens: int, rows: int) -> float:
    """Operations of attention: q . k and p . v, two each."""
    return 4.0 * shape.layers * shape.heads * shape.head_dim * tokens * rows


def candidates(request: PlanRequest) -> list[str]:
    """The methods that `auto` may come to, or the one that was asked for."""
    settings = request.speculation
    asked = METHODS[settings.method]
    if not asked.adaptive:
        return [settings.method]
    drafter = drafter_kind(settings)
    drafters = {None, drafter, CHOSEN if drafter else None}
    middles = {None, asked.middle if has_middle(settings, request.tokens) else None}
    plain = (row for row in METHODS.values() if not row.adaptive)
    return [row.name for row in plain if row.drafter in drafters and row.middle in middles]


def prefill(passes: Passes) -> Time:
    """Time to the first token, loading aside. What is offloaded goes to the host while the next rows are computed.

    With chunks outside, all that is offloaded is read again for every chunk: half of it on average for KV.
    """
    request, placed = passes.request, passes.placed
    shape, hardware, tokens = request.shape, request.hardware, request.tokens
    linear = 2 * shape.layers * shape.layer_parameters * tokens
    causal = _scoring(shape, tokens, tokens) / 2
    compute = (linear + causal) / hardware.gpus / hardware.flops / COMPUTE
    chunks = max(tokens / request.prefill_chunk, 1)
    if hardware.gpus > 1:
        compute += 2 * shape.layers * (ALL_REDUCE_S * chunks + tokens * shape.hidden * request.itemsize / hardware.link)
    kv, weights = (placed.host.parts.get(name, 0) / hardware.gpus for name in ("KV cache", "weights"))
    moved = kv + weights if placed.prefill_order == "layers" else kv * (1 + chunks / 2) + weights * chunks
    time = overlapped(link=moved / hardware.link, compute=compute)
    return replace(time, seconds=time.seconds + passes.full(1)[0].seconds)
