"""Plans the values of an experiment: predicted, with nothing loaded. Imports torch only for trees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from offload.hardware import profiles
from offload.hardware.rates import describe
from offload.loading.hub.download import dimensions
from offload.planning.passes import Passes
from offload.planning.placement import PlanRequest
from offload.planning.plan import Plan, make_plan
from offload.planning.reference_loop import reference_token_s
from offload.settings.config import Placement
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
