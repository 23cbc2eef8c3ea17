"""Plans the values of an experiment: predicted, with nothing loaded. Imports torch only for trees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from offload.hardware import profiles
from offload.hardware.rates import READ, describe
from offload.loading.hub.download import dimensions
from offload.planning.latency import Decoding, draft_acceptance, draft_rounds
from offload.planning.passes import Passes
from offload.planning.placement import PlanRequest
from offload.planning.plan import Plan, make_plan
from offload.planning.roofline import ALL_REDUCE_S, SAMPLE_S
from offload.settings.config import Placement
from offload.settings.methods import METHODS
from offload.units import GIB

from .definition import PlanCase, Value


@dataclass(frozen=True, slots=True)
class Planned:
    """A value with its plan's prediction; None with the reason where there is no plan, or it does not fit.

    `authors_code` is the prediction for the code of the paper, where the plan asks for it.
    """

    value: Value
    planned: float | None
    reason: str = ""
    authors_code: float | None = None


def plan_values(values: Sequence[Value]) -> list[Planned]:
    """Return the values with their predictions. Raises TriforceError for an unknown profile or model."""
    plan_of = cache(lambda case: make_plan(_request(case)))  # for the call: several measures of one plan
    return [_planned(value, plan_of) for value in values]


def _planned(value: Value, plan_of: Callable[[PlanCase], Plan]) -> Planned:
    if value.plan is None:
        return Planned(value, None, value.missing or "")
    plan = plan_of(value.plan)
    if not plan.fits:
        return Planned(value, None, f"does not fit (planned): {plan.shortage()}")
    plain_s = plan.ttft.seconds if value.plan.recompute else plan.plain.tbt.seconds
    planned = _measure(plan, value.measure, plain_s, plan.chosen.tbt.seconds)
    if not value.plan.authors_code:
        return Planned(value, planned)
    passes = Passes(plan.request, plan.placed)
    own_s = [reference_token_s(passes, decoding) for decoding in (plan.plain, plan.chosen)]
    return Planned(value, planned, authors_code=_measure(plan, value.measure, *own_s))


def _measure(plan: Plan, measure: str, plain_s: float, chosen_s: float) -> float | None:
    """Return a measure of a plan whose tokens take so long, plain and with its method."""
    rates = {"speedup": plain_s / chosen_s, "tbt_ms": 1000 * chosen_s}
    rates["tokens_per_s"] = plan.request.sequences / chosen_s
    rates["tokens_per_verification"] = plan.chosen.tokens_per_verification
    return rates.get(measure)


def _request(case: PlanCase) -> PlanRequest:
    memory = None if case.memory_gib is None else int(case.memory_gib * GIB)
    return PlanRequest(
        case.model,
        dimensions(case.model),
        case.tokens,
        describe(profiles.load(case.gpu)),
        Placement(offload=case.offload, resident_layers=case.resident_layers, memory=memory),
        case.speculation(),
        draft=None if case.draft is None else dimensions(case.draft),
        acceptance=case.token_acceptance,
        draft_acceptance=case.draft_acceptance,
        sequences=case.sequences,
        static_batch=case.static_batch,
    )


# A layer's kernels in a CUDA graph, beside reading bytes: a pass over 8 rows and 4,096 tokens of Llama-2-7B takes
# 14.02 ms on an A100 (A100_llama_7B_128K_graph_turning_point.csv), of which reading at READ takes 8.84; 32 layers.
KERNELS_S = 162e-6
# A layer without a graph, by the host: 17.7 ms for 32 on an A100 (A100_Ablation_wo_chain.csv), 19.4 ms where layers are
# split between RTX 4090s (tp_4090.csv), 24.2 ms with Hugging Face's model (Sequoia, arXiv 2402.12374, table 1).
EAGER_LAYER_S, SPLIT_LAYER_S, HUGGING_FACE_LAYER_S = 0.55e-3, 0.61e-3, 0.756e-3
DRAFT_LAYER_S = 0.25e-3  # of a draft model in a graph: .5 ms for the two of JackFram/llama-68m (Sequoia, table 1)
WAIT_S = SAMPLE_S["cuda"]  # drawing or comparing, and a value for which the host waits
ROUND_WAITS = 3  # of a round of the first level: for the draft's token, its comparison, the token after it


def reference_token_s(passes: Passes, decoding: Decoding) -> float:
    """Return the seconds a token that the papers' own code takes with the settings of a planned method.

    A plan says how fast this program should be. The authors' code does the same passes, with more around them:
    TriForce's waits for the host at each token of both levels, launches without CUDA graphs where it streams or is
    split, and always reads the retrieval cache with as many rows as a draft is long; Sequoia's verifies with Hugging
    Face's model. Times of the parts are the authors' own, most of them in the public repository
    ranonrkm/TriForce-legacy. None is fitted to a published speed-up.
    """
    request = passes.request
    wait = WAIT_S if request.hardware.gpus == 1 else WAIT_S + ALL_REDUCE_S  # each is broadcast
    gamma, gamma1, tokens = decoding.gamma2, decoding.gamma1, decoding.tokens_per_verification
    verifying = _full(passes, gamma + 1)
    if gamma == 0:
        drafting = 0.0
    elif _has_tree(passes):
        drafting, wait = decoding.depth * _draft(passes), 0.0
    elif METHODS[decoding.method].middle is None:
        drafting = gamma * (_draft(passes) + wait)
    elif gamma1 == 0:
        drafting = gamma * (_retrieval(passes, 1, graphed=False) + wait)
    else:
        graphed = request.hardware.gpus == 1 and passes.placed.resident_layers == request.shape.kv_layers
        each = gamma1 * _draft(passes) + _retrieval(passes, gamma + 1, graphed) + ROUND_WAITS * wait
        drafting = draft_rounds(draft_acceptance(request), gamma1, gamma, 1) * each
    return (drafting + verifying) / tokens + wait  # accepted tokens are compared one by one


def _full(passes: Passes, rows: int) -> float:
    """Return the seconds of a verification without a graph; a layer is copied once the one before is launched."""
    resources = passes.full(rows)[0].resources
    return max(_device(passes, resources["device memory"]), resources["link"] + _launching(passes))


def _retrieval(passes: Passes, rows: int, graphed: bool) -> float:
    """Return the seconds of a pass over the retrieval cache."""
    request = passes.request
    read = passes.linears(rows).weights + request.kv_bytes(request.budget) / request.hardware.gpus
    device = _device(passes, read / request.hardware.bandwidth / READ)
    return device if graphed else max(device, _launching(passes))


def _draft(passes: Passes) -> float:
    """Return the seconds of a step of the draft model: of its launches, or of a larger one's bytes; 0 for lookup."""
    draft = passes.request.draft
    return 0.0 if draft is None else max(draft.layers * DRAFT_LAYER_S, passes.draft_step() - passes.sample_s)


def _device(passes: Passes, reading: float) -> float:
    return reading + passes.request.shape.layers * KERNELS_S


def _launching(passes: Passes) -> float:
    """Return the seconds in which the host launches a pass."""
    split = passes.request.hardware.gpus > 1
    layer = HUGGING_FACE_LAYER_S if _has_tree(passes) else SPLIT_LAYER_S if split else EAGER_LAYER_S
    return passes.request.shape.layers * layer


def _has_tree(passes: Passes) -> bool:
    return passes.request.speculation.tree_shape.kind != "chain"
