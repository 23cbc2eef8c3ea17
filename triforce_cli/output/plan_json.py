"""A plan as JSON fields: bytes, seconds and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from offload.hardware.calibration import Measured
from offload.planning.latency import Decoding
from offload.planning.placement import Tier
from offload.planning.plan import Plan
from offload.planning.suggestions import Suggestion

from .plan_flags import flags_of


def measured_fields(measured: Measured | None) -> dict[str, Any] | None:
    """Return a measurement's fields; None without one."""
    return None if measured is None else asdict(measured)


def plan_fields(plan: Plan, suggestions: Sequence[Suggestion] = ()) -> dict[str, Any]:
    """Return a plan's fields."""
    request, where = plan.request, plan.placed
    return {
        "fits": plan.fits,
        "model": request.model,
        "parameters": request.shape.parameters,
        "quantize": request.quantize,
        "weight_bits": asdict(request.bits),
        "kv": request.kv,
        "resident_tokens": plan.resident_tokens,
        "context": request.tokens,
        "hardware": asdict(request.hardware),
        "memory": {"device": tier_fields(plan.device), "host": tier_fields(plan.host), "disk": tier_fields(plan.disk)},
        "offload": plan.offload,
        "layers": request.shape.layers,
        "resident_layers": where.resident_layers,
        "weight_layers": where.weight_layers,
        "host_share": plan.host_share,
        "experts": where.experts if request.shape.experts else None,
        "expert_layers": request.shape.experts.layers - where.away_layers if request.shape.experts else None,
        "expert_times": [asdict(each) for each in plan.expert_times],
        "budget": plan.budget,
        "chunk": request.speculation.chunk,
        "prefill_order": where.prefill_order,
        "prefill_chunk": request.prefill_chunk,
        "ttft": asdict(plan.ttft),
        "plain": decoding_fields(plan.plain),
        "chosen": decoding_fields(plan.chosen),
        "speedup": plan.speedup,
        "flags": flags_of(plan) if plan.fits else [],
        "missing": plan.shortage() or None,
        "ways_out": [suggestion.text for suggestion in suggestions],
    }


def tier_fields(tier: Tier) -> dict[str, Any]:
    """Return a memory's fields."""
    return {"parts": tier.parts, "total": tier.total, "limit": tier.limit}


def decoding_fields(decoding: Decoding) -> dict[str, Any]:
    """Return the fields of a method's predicted speed; tokens a second are those of one sequence."""
    return {**asdict(decoding), "tokens_per_s": 1 / decoding.tbt.seconds}
