"""How fast a placement will be: time to the first token, and time between tokens for each method.

The target's passes are timed by costs.py; tokens per verification follow from the acceptance rate (Leviathan et al.,
arXiv 2211.17192), level upon level (TriForce, arXiv 2404.11912).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .config import LONGEST_GAMMA
from .costs import ALL_REDUCE_S, COMPUTE, SAMPLE_S, Pass, Time, overlapped, pass_time
from .levels import has_draft_model
from .placement import Placed, PlanRequest
from .rates import expected_tokens
from .sizes import Sizes

# Until it is measured. TriForce keeps "above 0.9 even at temperature 1.0" with 4K of 122K tokens (its project page);
# its JackFram/llama-68m had about .35 of its tokens accepted by the retrieval level.
RETRIEVAL_ACCEPTANCE = 0.9
DRAFT_ACCEPTANCE = 0.35
LOOKUP_ACCEPTANCE = 0.3  # n-gram lookup on book summaries: it proposes for half of the places and is right for 60 %
SHARES = 64  # steps in which the host's share is searched
NEARLY = 1.05  # times the best time: drafts that long are still worth considering


@dataclass(frozen=True, slots=True)
class Decoding:
    """One way to decode.

    `tbt` is the time between tokens; `host_share` the part of the KV that is not resident which the host attends to;
    gamma1 and gamma2 (0: no such level) are drafted tokens a verification, `gammas` the range of gamma2 worth trying;
    `verify_s` and `draft_s` are one verification and all drafting before it.
    """

    method: str
    tbt: Time
    host_share: float
    tokens_per_verification: float = 1.0
    gamma1: int = 0
    gamma2: int = 0
    gammas: tuple[int, int] = (0, 0)
    verify_s: float = 0.0
    draft_s: float = 0.0


def full_pass(request: PlanRequest, placed: Placed, rows: int) -> tuple[Time, float]:
    """A pass of the target over the full cache, and the host's share with which it is fastest."""
    mode, fixed = request.placement.offload, request.placement.host_share
    if mode == "stream" or placed.resident_layers == request.shape.layers:
        shares = [0.0]
    elif mode == "host":
        shares = [1.0]
    elif fixed is not None:
        shares = [fixed]
    else:
        shares = [n / SHARES for n in range(SHARES + 1)]
    times = [(pass_time(_full(request, placed, rows, share), request.hardware), share) for share in shares]
    return min(times, key=lambda pair: pair[0].seconds)


def _full(request: PlanRequest, placed: Placed, rows: int, share: float) -> Pass:
    shape, gpus = request.shape, request.hardware.gpus
    kv = shape.kv_bytes(request.tokens, request.itemsize)
    away = kv * (1 - placed.resident_layers / shape.layers)
    scoring = 4 * shape.layers * shape.heads * shape.head_dim * request.tokens * rows  # q.k and p.v, 2 operations each
    hosted = share * away
    part = hosted / kv
    base = _linears(shape, request, placed, rows)
    return replace(
        base,
        kv=(kv - hosted) / gpus,
        copied=base.copied + (away - hosted) / gpus,
        hosted=hosted,
        attention_flops=scoring * (1 - part) / gpus,
        hosted_flops=scoring * part,
    )


def _linears(shape: Sizes, request: PlanRequest, placed: Placed | None, rows: int) -> Pass:
    """A pass without attention; `placed` says how many of the weights come over the link."""
    gpus, size = request.hardware.gpus, request.itemsize
    away = 0 if placed is None else (shape.layers - placed.weight_layers) * shape.layer_parameters * size
    split = 1 if placed is None else gpus  # a draft model is small: every device has the whole of it
    return Pass(
        rows=rows,
        layers=shape.layers,
        hidden_bytes=shape.hidden * size,
        weights=shape.read_parameters * size / split,
        kv=0.0,
        copied=away / split,
        hosted=0.0,
        linear_flops=2 * shape.read_parameters * rows / split,
        attention_flops=0.0,
        hosted_flops=0.0,
    )


def _retrieval_pass(request: PlanRequest, placed: Placed, rows: int) -> float:
    shape, budget = request.shape, min(request.speculation.budget, request.tokens)
    scoring = 4 * shape.layers * shape.heads * shape.head_dim * budget * rows
    work = replace(
        _linears(shape, request, placed, rows),
        kv=shape.kv_bytes(budget, request.itemsize) / request.hardware.gpus,
        attention_flops=scoring / request.hardware.gpus,
    )
    return pass_time(work, request.hardware).seconds


def _draft_token(request: PlanRequest) -> float:
    """Seconds a token of the draft model; lookup's are free."""
    if request.draft is None or not has_draft_model(request.speculation):
        return 0.0
    hardware, settings = replace(request.hardware, gpus=1), request.speculation
    work = replace(
        _linears(request.draft, request, None, 1),
        kv=request.draft.kv_bytes(settings.sink + settings.window, request.itemsize),
    )
    return pass_time(work, hardware).seconds + SAMPLE_S[hardware.device]


def decode(request: PlanRequest, placed: Placed, method: str) -> Decoding:
    """What a method will bring, with the draft lengths that were asked for, or the best ones."""
    sample = SAMPLE_S[request.hardware.device]
    if method == "ar":
        time, share = full_pass(request, placed, 1)
        return Decoding("ar", replace(time, seconds=time.seconds + sample), share, verify_s=time.seconds + sample)
    settings = request.speculation
    gammas = range(1, LONGEST_GAMMA + 1) if settings.gamma2 is None else (settings.gamma2,)
    ways = [_speculative(request, placed, method, gamma) for gamma in gammas]
    best = min(ways, key=lambda way: way.tbt.seconds)
    near = [way.gamma2 for way in ways if way.tbt.seconds <= NEARLY * best.tbt.seconds]
    return replace(best, gammas=(min(near), max(near)))


def _speculative(request: PlanRequest, placed: Placed, method: str, gamma: int) -> Decoding:
    token, gamma1, acceptance = _drafted_token(request, placed, method)
    time, share = full_pass(request, placed, gamma + 1)
    drafting, verifying = gamma * token, time.seconds + 2 * SAMPLE_S[request.hardware.device]
    tokens = expected_tokens(acceptance, gamma)
    bound = time.bound if verifying >= drafting else "drafting"
    resources = {name: seconds / tokens for name, seconds in time.resources.items()} | {"drafting": drafting / tokens}
    tbt = Time((drafting + verifying) / tokens, bound, resources)
    return Decoding(method, tbt, share, tokens, gamma1, gamma, (gamma, gamma), verifying, drafting)


def _drafted_token(request: PlanRequest, placed: Placed, method: str) -> tuple[float, int, float]:
    """Seconds a token that is proposed to the full cache, gamma1, and the acceptance of such tokens."""
    settings, model = request.speculation, has_draft_model(request.speculation)
    below = request.draft_acceptance or (DRAFT_ACCEPTANCE if model else LOOKUP_ACCEPTANCE)
    if method in ("lookup", "naive"):
        return (0.0, 0, LOOKUP_ACCEPTANCE) if method == "lookup" else (_draft_token(request), 0, below)
    acceptance = RETRIEVAL_ACCEPTANCE if request.acceptance is None else request.acceptance
    sample = SAMPLE_S[request.hardware.device]
    if method == "retrieval" or settings.draft == "none":
        return _retrieval_pass(request, placed, 1) + sample, 0, acceptance
    gammas = range(1, LONGEST_GAMMA + 1) if settings.gamma1 is None else (settings.gamma1,)
    each = _draft_token(request)
    times = {
        g: (g * each + _retrieval_pass(request, placed, g + 1) + 2 * sample) / expected_tokens(below, g) for g in gammas
    }
    best = min(times, key=times.__getitem__)
    return times[best], best, acceptance


def candidates(request: PlanRequest) -> list[str]:
    """The methods that `auto` may come to, or the one that was asked for."""
    settings = request.speculation
    if settings.method != "auto":
        return [settings.method]
    drafts = ["naive"] if has_draft_model(settings) else ["lookup"] if settings.draft == "lookup" else []
    return ["ar", *drafts, "retrieval", *(["triforce"] if settings.draft != "none" else [])]


def prefill(request: PlanRequest, placed: Placed) -> Time:
    """Time to the first token. What is offloaded is written to the host while the next rows are computed.

    With chunks outside, all that is offloaded is read again for every chunk: half of it on average for KV.
    """
    shape, hardware, tokens = request.shape, request.hardware, request.tokens
    linear = 2 * shape.layers * shape.layer_parameters * tokens
    causal = 4 * shape.layers * shape.heads * shape.head_dim * tokens**2 / 2
    compute = (linear + causal) / hardware.gpus / hardware.flops / COMPUTE
    if hardware.gpus > 1:
        moved = tokens * shape.hidden * request.itemsize / hardware.link
        compute += 2 * shape.layers * (moved + ALL_REDUCE_S * max(tokens / request.prefill_chunk, 1))
    chunks = max(tokens / request.prefill_chunk, 1) if placed.prefill_order == "chunks" else 1
    kv, weights = (placed.host.parts.get(name, 0) / hardware.gpus for name in ("KV cache", "weights"))
    read_back = kv * chunks / 2 if chunks > 1 else 0
    first = full_pass(request, placed, 1)[0].seconds
    time = overlapped(link=(kv + read_back + weights * chunks) / hardware.link, compute=compute)
    return replace(time, seconds=time.seconds + first)
