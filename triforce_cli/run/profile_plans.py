"""Plans by names of profiles and models, with neither the GPU nor the weights: also which model has room for a text."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload.architecture.dims import Dimensions
from offload.architecture.known_models import KNOWN, compatible, known_name, sibling_of
from offload.architecture.yarn import layers_with_windows
from offload.errors import ModelNotFound, PromptError, SettingsError, TriforceError
from offload.hardware import profiles
from offload.hardware.calibration import Measured, applied, profile_of_found
from offload.hardware.driver import gpu_names
from offload.hardware.profiles import Profile, same_gpu
from offload.hardware.rates import Hardware, describe
from offload.loading.hub.download import (
    describe_source,
    dimensions,
    draft_dimensions,
    stored_bits,
)
from offload.loading.hub.registry import HUB_MODELS, draft_error
from offload.planning.plan import Plan, make_plan
from offload.settings.config import DEFAULT_MODEL
from offload.settings.kv_formats import BF16, KV_FORMATS, PLAIN_KV
from offload.system.machine import free_host_memory, usable_cores
from offload.units import counted

from ..options.checks import free_on_disk
from ..options.settings import NO_PROFILE, Settings, resolve_with
from ..output.plan_text import PlanComparison, PlanReport
from ..output.terminal import Terminal
from .measured_rates import load_measured
from .plan import plan_inputs, plan_with_suggestions

DEFAULT_GPU_MODEL = "Llama-3.1-8B"
LONGEST_DEFAULT = 128 * 1024  # tokens
TEXT_FILE = "book.txt"  # stands for the user's text in the command line of a plan


@dataclass(frozen=True, slots=True)
class Target:
    """The hardware that is planned for: `profile` describes it, None if no profile does.

    Args:
        name: the profile's name or file, as it was given; "auto" for the hardware found.
        found: names of this machine's GPUs.
    """

    name: str
    found: Sequence[str]
    profile: Profile | None


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options that a plan follows: flags by name, and where each came from.

    `context` is in tokens, None for the model's own; `extend_context` allows one beyond it.
    """

    flags: Mapping[str, Any]
    origins: Mapping[str, str]
    context: int | None
    extend_context: bool = False


def _visible_gpus() -> list[str]:
    return gpu_names(os.environ.get("CUDA_VISIBLE_DEVICES"))


def find_target(name: str | None) -> Target:
    """Return the hardware of a profile's name or file; that of this machine for None or "auto".

    Raises SettingsError.
    """
    found = _visible_gpus()
    if name is None or name.lower() == profiles.AUTO:
        return Target(profiles.AUTO, found, profiles.matching(found))
    return Target(name, found, profiles.load(name))


def plan_target(target: Target, options: PlanOptions, measured: Measured | None) -> PlanReport:
    """Return the plan for some hardware, with its measured rates if it is this machine's. Raises SettingsError."""
    profile = target.profile or profile_of_found(target.found, measured)
    if profile is None:
        raise profiles.undescribed(target.found)
    rated = applied(profile, measured, target.found)
    hardware = hardware_of(rated, target.found)
    if profile.name not in profiles.available():  # --gpu takes the file's path, or "auto" without a profile
        hardware = replace(hardware, name=target.name)
    plan, suggestions = _plan(profile, options, hardware, profile.device == "cuda")
    source = describe_source(plan.inputs.model)
    arguments = [*(["--extend-context"] if options.extend_context else []), "-f", TEXT_FILE]
    sibling = None if plan.inputs.draft is not None else sibling_of(plan.inputs.model, plan.inputs.shape)
    rates = measured if rated is not profile else None
    return PlanReport(plan, suggestions, rates, profile, source, arguments, sibling=sibling)


def plan_all_profiles(found: Sequence[str], options: PlanOptions, measured: Measured | None) -> PlanComparison:
    """Return the plans for all profiles, those of this machine's hardware with its measured rates.

    Profiles without bf16 are left out where weights are to be quantised, and GPUs where keys and values are.
    """
    needs_bf16 = options.flags.get("quantize") is not None
    needs_cpu = KV_FORMATS[options.flags.get("kv", BF16)] is not PLAIN_KV
    plans, names = [], []
    for sheet in map(profiles.load, profiles.available()):
        rated = applied(sheet, measured)
        hardware = hardware_of(rated, found)
        if (needs_bf16 and hardware.dtype != "bf16") or (needs_cpu and not hardware.shared):
            continue
        plans.append(_plan(rated, options, hardware, True))
        names += [rated.name] if rated is not sheet else []
    return PlanComparison(plans, measured if names else None, names)


def hardware_of(profile: Profile, found: Sequence[str]) -> Hardware:
    """Return the profile's hardware; what it does not state of the host is this machine's, if it is that of `found`."""
    model = None if profile.gpu is None else profile.gpu.model
    count = sum(model is not None and same_gpu(name, model) for name in found)
    is_here = profile.device == "cpu" or 0 < profile.gpus <= count
    return describe(profile, free_host_memory(), usable_cores()) if is_here else describe(profile)


def _plan(profile: Profile, options: PlanOptions, hardware: Hardware, on_gpu: bool) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan and suggestions for the model of the options, else the default one. Raises PromptError."""
    settings = resolve_with(options.flags, options.origins, profile)
    model = settings.values.get("model", DEFAULT_GPU_MODEL if on_gpu else DEFAULT_MODEL)
    shape = dimensions(model)
    tokens = min(shape.context, LONGEST_DEFAULT) if options.context is None else options.context
    if tokens > shape.context:
        _check_extension(model, shape, tokens, options.extend_context)
    settings = replace(settings, engine=replace(settings.engine, model=model))
    in_bf16 = settings.engine.dtype in ("auto", "bfloat16") and hardware.dtype == "bf16"
    if settings.placement.disk is not None:
        hardware = replace(hardware, disk_free=free_on_disk(Path(settings.placement.disk)))
    draft, stored = _draft_shape(settings, model, shape), stored_bits(model) if in_bf16 else None
    return plan_with_suggestions(plan_inputs(settings, shape, tokens, hardware, draft, stored))


def _check_extension(model: str, shape: Any, tokens: int, may_extend: bool) -> None:
    """Raise UnsupportedModel or PromptError unless a context beyond the model's is allowed, and can be."""
    if may_extend and shape.sliding_layers:
        raise layers_with_windows()
    if not may_extend:
        extend = "" if shape.sliding_layers else " --extend-context,"
        raise PromptError(
            f"a context of {counted(tokens, 'token')} exceeds the {shape.context:,} of {model}",
            f"use --context {shape.context} or less,{extend} --model with a longer context, or "
            "`triforce summarize`, which reads a long text in parts",
        )


def _draft_shape(settings: Settings, model: str, target: Dimensions) -> Dimensions | None:
    """Return the dimensions of the draft model; None without one. Raises SettingsError if it cannot draft."""
    name = settings.speculation.draft_model
    if name is None:
        return None
    try:
        shape = draft_dimensions(name, target)
    except ModelNotFound as error:
        raise draft_error(error) from error
    known, draft = known_name(model), known_name(name)
    if known is not None and draft is not None and not compatible(known, draft):
        sibling = sibling_of(model, KNOWN[known])
        hint = "use --draft lookup" if sibling is None else f"use --draft {sibling}, or --draft lookup"
        raise SettingsError(f"the draft model {name} has another vocabulary than {model}", hint)
    return shape


_PATIENCE = 300  # seconds until the first word: a model that reads longer is no advice
_CONTINUE_ONLY = {"Yi-6B-200K", "Yi-34B-200K"}  # models without a chat template
_HINDRANCES = "gated", "pickled"  # in the notes of models that a plan does not choose by itself


@dataclass(frozen=True, slots=True)
class LongModel:
    """A model with room for a text on this machine, and the predicted seconds until its first token."""

    name: str
    ttft_s: float
    download_bytes: int


def known_model(tokens: int, settings: Settings, terminal: Terminal) -> LongModel | None:
    """Return the largest well-known model that reads `tokens` soon on this machine, and that --model fetches as it is.

    None if none has such a context, fits the memory and is quick, or if no profile describes this machine.
    """
    found = []
    for name, model in HUB_MODELS.items():
        if name in _CONTINUE_ONLY or any(word in model.note for word in _HINDRANCES) or model.is_for_plans:
            continue
        try:
            plan = None if KNOWN[name].context < tokens else _plan_here(name, tokens, settings, terminal)
        except TriforceError:  # a model that is not supported, or a GPU that no profile describes
            continue
        if plan is not None and plan.fits and plan.ttft.seconds <= _PATIENCE:
            found.append(LongModel(name, plan.ttft.seconds, 2 * plan.inputs.shape.parameters))  # in 16 bits
    return max(found, key=lambda model: model.download_bytes, default=None)


def _plan_here(name: str, tokens: int, settings: Settings, terminal: Terminal) -> Plan:
    """Return the plan of a model on this machine. Raises TriforceError."""
    found, measured = _visible_gpus(), load_measured(terminal)
    profile = profiles.load("cpu") if settings.engine.device == "cpu" else settings.profile
    if profile.name == NO_PROFILE:
        described = profile_of_found(found, measured)
        if described is None:
            raise profiles.undescribed(found)
        profile = described
    hardware = hardware_of(applied(profile, measured, found), found)
    named = replace(settings, engine=replace(settings.engine, model=name))
    return make_plan(plan_inputs(named, dimensions(name), tokens, hardware, stored=stored_bits(name)))
