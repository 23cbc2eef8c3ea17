"""Settings and a model's shape -> a plan, and what becomes of it: text, JSON, an exit code. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from offload.architecture.dims import Sizes
from offload.errors import SettingsError
from offload.hardware import profiles
from offload.hardware.calibration import Measured
from offload.hardware.profiles import Profile
from offload.hardware.rates import Hardware, describe, placed
from offload.planning.latency import Decoding
from offload.planning.placement import PlanRequest, Tier
from offload.planning.plan import Plan, make_plan
from offload.planning.suggestions import Suggestion, suggestions

from ..exit_codes import DONE, FAILED
from ..options.settings import Settings
from ..output.plan import plan_text
from ..output.plan_flags import flags_of
from ..output.renderers import json_line
from ..output.terminal import Terminal


def request_for(
    settings: Settings, shape: Sizes, tokens: int, hardware: Hardware, draft: Sizes | None = None
) -> PlanRequest:
    """What the settings ask of a plan."""
    return PlanRequest(
        model=settings.engine.model,
        shape=shape,
        tokens=tokens,
        hardware=placed(hardware, settings.placement),
        placement=settings.placement,
        speculation=settings.speculation,
        prefill_chunk=settings.engine.prefill_chunk,
        itemsize=4 if settings.engine.dtype == "float32" else 2,
        draft=draft,
    )


def other_hardware() -> list[Hardware]:
    """The machines that come with the program, to choose from."""
    found = []
    for name in profiles.available():
        try:
            found.append(describe(profiles.load(name)))
        except SettingsError:  # its rates are not known
            continue
    return found


def plan_with_ways(request: PlanRequest) -> tuple[Plan, tuple[Suggestion, ...]]:
    """A plan, and if it does not fit, what would."""
    plan = make_plan(request)
    return plan, () if plan.fits else suggestions(request, other_hardware())


def tell(
    plan: Plan,
    ways: Sequence[Suggestion],
    terminal: Terminal,
    profile: Profile | None,
    measured: Measured | None,
    json: bool,
) -> int:
    """The plan on stdout, what is missing on stderr; the exit code.

    `profile` stands beside the plan in JSON; `measured` is where its rates come from, if not from a data sheet.
    """
    if json:
        beside = {} if profile is None else {"profile": asdict(profile)}
        terminal.write(json_line(type="plan", **beside, measured=rates(measured), plan=plan_fields(plan, ways)))
    else:
        terminal.write(plan_text(plan, terminal.stdout_is_terminal, measured))
    if plan.fits:
        return DONE
    terminal.error(plan.shortage(), hint(ways))
    return FAILED


def rates(measured: Measured | None) -> dict[str, Any] | None:
    """A measurement for JSON."""
    return None if measured is None else asdict(measured)


def hint(ways: Sequence[Suggestion]) -> str:
    """The ways out in one line."""
    return "; or ".join(way.text for way in ways) if ways else "use a smaller model, or other hardware"


def plan_fields(plan: Plan, ways: Sequence[Suggestion] = ()) -> dict[str, Any]:
    """A plan for JSON: bytes, seconds and tokens."""
    request, where = plan.request, plan.placed
    return {
        "fits": plan.fits,
        "model": request.model,
        "parameters": request.shape.parameters,
        "context": request.tokens,
        "hardware": asdict(request.hardware),
        "memory": {"device": _tier(plan.device), "host": _tier(plan.host)},
        "offload": plan.offload,
        "layers": request.shape.layers,
        "resident_layers": where.resident_layers,
        "weight_layers": where.weight_layers,
        "host_share": plan.host_share,
        "budget": plan.budget,
        "chunk": request.speculation.chunk,
        "prefill_order": where.prefill_order,
        "prefill_chunk": request.prefill_chunk,
        "ttft": asdict(plan.ttft),
        "plain": _decoding(plan.plain),
        "chosen": _decoding(plan.chosen),
        "speedup": plan.speedup,
        "flags": flags_of(plan),
        "missing": plan.shortage() or None,
        "ways_out": [way.text for way in ways],
    }


def _tier(tier: Tier) -> dict[str, Any]:
    return {"parts": tier.parts, "total": tier.total, "limit": tier.limit}


def _decoding(way: Decoding) -> dict[str, Any]:
    return {**asdict(way), "tokens_per_s": 1 / way.tbt.seconds}
