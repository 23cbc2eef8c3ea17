"""Models with room for a text that is too long for the default one: in the hub's cache, or to be fetched.

Which of them fit is planned, as `triforce profile` does. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from offload.architecture.known_models import KNOWN
from offload.errors import TriforceError
from offload.hardware import profiles
from offload.hardware.calibration import applied, profile_of_found
from offload.hardware.driver import gpu_names
from offload.loading.hub.download import cached_models, dimensions, stored_bits
from offload.loading.hub.hub_models import HUB_MODELS
from offload.planning.plan import Plan, make_plan

from ..options.settings import NO_PROFILE, Settings
from ..output.terminal import Terminal
from .calibration import load_measured
from .plan import plan_request
from .profile_plans import hardware_of

PATIENCE = 1800  # seconds: a model that reads longer before its first word is not taken without being asked for
_WANTED = 600  # seconds until the first word; of the models that take no longer, the largest is the best
_CONTINUE_ONLY = {"Yi-6B-200K", "Yi-34B-200K"}  # models without a chat template
_HINDRANCES = "gated", "pickled"  # in the notes of models that --model alone does not fetch


@dataclass(frozen=True, slots=True)
class LongModel:
    """A model with room for a text on this machine, and the predicted seconds until its first token."""

    name: str
    ttft_s: float
    parameters: int


def long_model(names: Iterable[str], tokens: int, settings: Settings, terminal: Terminal) -> LongModel | None:
    """Return the best of some models for a sequence of `tokens`: the largest that is quick, else the quickest.

    None if none has such a context and fits this machine's memory, or if no profile describes this machine.
    """
    found = [each for name in names if (each := _planned(name, tokens, settings, terminal)) is not None]
    quick = [each for each in found if each.ttft_s <= _WANTED]
    if quick:
        return max(quick, key=lambda each: each.parameters)
    return min(found, key=lambda each: each.ttft_s, default=None)


def cached_model(tokens: int, settings: Settings, terminal: Terminal) -> LongModel | None:
    """Return the best model in the hub's cache for a sequence of `tokens`; None without one that reads it in time."""
    found = long_model(cached_models(), tokens, settings, terminal)
    return found if found is not None and found.ttft_s <= PATIENCE else None


def known_model(tokens: int, settings: Settings, terminal: Terminal) -> LongModel | None:
    """Return the best well-known model for a sequence of `tokens` that --model fetches as it is; None without any."""
    names = (
        name
        for name, model in HUB_MODELS.items()
        if name not in _CONTINUE_ONLY and not any(word in model.note for word in _HINDRANCES)
    )
    return long_model(names, tokens, settings, terminal)


def _planned(name: str, tokens: int, settings: Settings, terminal: Terminal) -> LongModel | None:
    try:
        shape = KNOWN[name] if name in KNOWN else dimensions(name)
        if shape.context < tokens:
            return None
        plan = _plan(name, tokens, settings, terminal)
    except TriforceError:  # a model that is not supported, or a GPU that no profile describes
        return None
    return LongModel(name, plan.ttft.seconds, plan.request.shape.parameters) if plan.fits else None


def _plan(name: str, tokens: int, settings: Settings, terminal: Terminal) -> Plan:
    """Return the plan of a model on this machine. Raises TriforceError."""
    found = gpu_names(os.environ.get("CUDA_VISIBLE_DEVICES"))
    measured = load_measured(terminal)
    profile = profiles.load("cpu") if settings.engine.device == "cpu" else settings.profile
    if profile.name == NO_PROFILE:
        profile = profile_of_found(found, measured)
    if profile is None:
        raise profiles.undescribed(found)
    hardware = hardware_of(applied(profile, measured, found), found)
    named = replace(settings, engine=replace(settings.engine, model=name))
    return make_plan(plan_request(named, dimensions(name), tokens, hardware, stored=stored_bits(name)))
