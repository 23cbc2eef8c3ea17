"""From the plan of a request to how its KV cache is spread, before anything is loaded."""

from __future__ import annotations

import math

from offload.errors import SettingsError
from offload.loader import OpenModel
from offload.offloading import TierSettings
from offload.planning.plan import Plan

from ..options.settings import Settings
from ..output.terminal import Terminal
from .calibration import saved
from .dry_run import check_tiers, request_of
from .planning import hint, plan_with_ways


def tiers_for(opened: OpenModel, settings: Settings, tokens: int, terminal: Terminal) -> TierSettings | None:
    """How the KV cache of a sequence of `tokens` is spread; None where all of it stays on the device.

    Ranks that share the model do as the one with the least room. Raises OutOfMemory with the numbers and what would
    fit, SettingsError for tiers that this machine has not.
    """
    found = opened.group.collect(_tiers_for(opened, settings, tokens, terminal))
    return min((tiers for tiers in found if tiers is not None), key=on_device, default=None)


def on_device(tiers: TierSettings) -> tuple[float, int]:
    """Layers whose weights, and whose KV, stay there."""
    return math.inf if tiers.weight_layers is None else tiers.weight_layers, tiers.resident_layers


def _tiers_for(opened: OpenModel, settings: Settings, tokens: int, terminal: Terminal) -> TierSettings | None:
    placement = settings.placement
    check_tiers(opened, placement)
    if opened.device.type == "cpu" and placement.link_gb_s is None:
        opened.check_fit(tokens, settings.memory_limit("cpu"))
        return None
    try:
        request, _ = request_of(opened, settings, tokens, saved(terminal))
    except SettingsError:  # nobody knows this GPU's rates: without them there is no plan, but there may be room
        if placement.offload not in ("auto", "none"):
            raise
        opened.check_fit(tokens, settings.memory_limit(opened.device.type))
        return None
    plan, ways = plan_with_ways(request)
    plan.require_fit(hint(ways))
    everything = plan.offload == "none" and plan.placed.weight_layers == plan.request.shape.layers
    return None if everything else _settings(plan, placement.host_share)


def _settings(plan: Plan, share: float | None) -> TierSettings:
    where, placement = plan.placed, plan.request.placement
    mode = plan.offload if placement.offload == "auto" else placement.offload
    return TierSettings(
        mode="stream" if mode == "none" else mode,
        resident_layers=where.resident_layers,
        share=share,
        by_layers=where.prefill_order == "layers",
        weight_layers=where.weight_layers if where.weight_layers < plan.request.shape.layers else None,
        link_gb_s=placement.link_gb_s,
    )
