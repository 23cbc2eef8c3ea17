"""Plans by names of profiles and models, with neither the GPU nor the weights: also which model has room for a text."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload.architecture.dims import Dimensions
from offload.architecture.known_models import KNOWN, compatible, is_current, known_name, sibling_of, weight_bytes
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
    is_here,
    stored_bits,
)
from offload.loading.hub.registry import HUB_MODELS, draft_error
from offload.planning.inputs import PlanInputs
from offload.planning.plan import Plan, make_plan
from offload.settings.config import DEFAULT_MODEL
from offload.settings.kv_formats import BF16, KV_FORMATS, PLAIN_KV
from offload.system.machine import free_host_memory, usable_cores
from offload.units import GIB, counted

from ..options.checks import free_on_disk
from ..options.request import Request
from ..options.settings import NO_PROFILE, Settings, resolve_with
from ..output.plan_text import PlanComparison, PlanReport
from ..output.terminal import Terminal
from .finished_runs import corrected
from .measured_rates import load_measured
from .plan import plan_inputs, plan_with_suggestions

DEFAULT_GPU_MODEL = "Llama-3.1-8B"
LONGEST_DEFAULT = 128 * 1024  # tokens
CHARACTERS_A_TOKEN = 4  # of English prose, to plan for a text before a tokenizer is here
TEXT_FILE = "book.txt"  # stands for the user's text in the command line of a plan
_PATIENCE = 300  # seconds until the first word: a model that reads longer is not recommended
_WANTED = 600  # seconds of a prompt and its answer; of the models that take no longer, the largest is the best
_PART, _PATIENCE_IN_PARTS = 8192, 1800  # tokens that are read together of a text in parts, and seconds of all parts
_ASSUMED_HOST_BYTES = 24 * GIB  # that a machine has beside its GPU, where that is not known
_QUICKER = 0.7  # of the best model's time: what another must not exceed to be shown beside it
_CONTINUE_ONLY = {"Yi-6B-200K", "Yi-34B-200K"}  # models without a chat template
FREE_MODELS = [name for name, model in HUB_MODELS.items() if model.is_free and name not in _CONTINUE_ONLY]


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

    `context` is in tokens, None for the model's own; `extend_context` allows one beyond it. `text` is the user's file.
    """

    flags: Mapping[str, Any]
    origins: Mapping[str, str]
    context: int | None
    extend_context: bool = False
    text: str = TEXT_FILE


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
    profile, rated, hardware = _rated(target, measured)
    plan, suggestions = plan_with_suggestions(_inputs(profile, options, hardware))
    source = describe_source(plan.inputs.model)
    arguments = [*(["--extend-context"] if options.extend_context else []), options.text]
    sibling = None if plan.inputs.draft is not None else sibling_of(plan.inputs.model, plan.inputs.shape)
    rates = measured if rated is not profile else None
    plan = corrected(plan) if rates else plan
    return PlanReport(plan, suggestions, rates, profile, source, arguments, sibling=sibling)


def _rated(target: Target, measured: Measured | None) -> tuple[Profile, Profile, Hardware]:
    """Return the profile of some hardware, the same with measured rates, and the hardware. Raises SettingsError."""
    profile = target.profile or profile_of_found(target.found, measured)
    if profile is None:
        raise profiles.undescribed(target.found)
    rated = applied(profile, measured, target.found)
    hardware = hardware_of(rated, target.found)
    if profile.name not in profiles.available():  # --gpu takes the file's path, or "auto" without a profile
        hardware = replace(hardware, name=target.name)
    return profile, rated, hardware


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
        flags = {"model": DEFAULT_GPU_MODEL} | dict(options.flags)
        plans.append(plan_with_suggestions(_inputs(rated, replace(options, flags=flags), hardware)))
        names += [rated.name] if rated is not sheet else []
    return PlanComparison(plans, measured if names else None, names)


def hardware_of(profile: Profile, found: Sequence[str]) -> Hardware:
    """Return the profile's hardware; what it does not state of the host is this machine's, if it is that of `found`."""
    model = None if profile.gpu is None else profile.gpu.model
    count = sum(model is not None and same_gpu(name, model) for name in found)
    is_here = profile.device == "cpu" or 0 < profile.gpus <= count
    return describe(profile, free_host_memory(), usable_cores()) if is_here else describe(profile)


def _inputs(profile: Profile, options: PlanOptions, hardware: Hardware) -> PlanInputs:
    """Return the inputs of a plan for the model of the options, else the default one. Raises PromptError."""
    settings = resolve_with(options.flags, options.origins, profile)
    model = settings.values.get("model", DEFAULT_GPU_MODEL if profile.device == "cuda" else DEFAULT_MODEL)
    shape = dimensions(model)
    tokens = min(shape.context, LONGEST_DEFAULT) if options.context is None else options.context
    if tokens > shape.context:
        _check_extension(model, shape, tokens, options.extend_context)
    return _inputs_of(model, shape, tokens, settings, hardware)


def _inputs_of(model: str, shape: Any, tokens: int, settings: Settings, hardware: Hardware) -> PlanInputs:
    settings = replace(settings, engine=replace(settings.engine, model=model))
    in_bf16 = settings.engine.dtype in ("auto", "bfloat16") and hardware.dtype == "bf16"
    if settings.placement.disk is not None:
        hardware = replace(hardware, disk_free=free_on_disk(Path(settings.placement.disk)))
    draft, stored = _draft_shape(settings, model, shape), stored_bits(model) if in_bf16 else None
    return plan_inputs(settings, shape, tokens, hardware, draft, stored)


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


@dataclass(frozen=True, slots=True)
class LongModel:
    """A model with room for a text on this machine, and the predicted seconds until its first token."""

    name: str
    ttft_s: float
    download_bytes: int


def known_model(tokens: int, settings: Settings, terminal: Terminal) -> LongModel | None:
    """Return the best well-known model that reads `tokens` soon on this machine, and that --model fetches as it is.

    None if none has such a context, fits the memory and is quick, or if no profile describes this machine.
    """
    plans = _fitting(tokens, lambda name: corrected(make_plan(_inputs_here(name, tokens, settings, terminal))))
    quick = [plan for plan in plans if plan.ttft.seconds <= _PATIENCE]
    if not quick:
        return None
    best = max(quick, key=_rank)
    return LongModel(best.inputs.model, best.ttft.seconds, weight_bytes(best.inputs.model))


def recommended(target: Target, options: PlanOptions, measured: Measured | None) -> list[Plan]:
    """Return plans of free well-known models for some hardware: the best model, and up to two that are quicker.

    Where none reads the context soon, their plans are for a part of it. Empty where that takes too long, too.
    """
    profile, _, hardware = _rated(target, measured)
    wanted = LONGEST_DEFAULT if options.context is None else options.context
    for tokens, most_s in ((wanted, _WANTED), (_PART, _PATIENCE_IN_PARTS * _PART / wanted)):

        def plan_of(name: str, tokens: int = tokens) -> Plan:
            flags = dict(options.flags) | {"model": name}
            return make_plan(_inputs(profile, replace(options, flags=flags, context=tokens), hardware))

        quick = [plan for plan in _fitting(tokens, plan_of) if plan.answer_s <= most_s]
        quick.sort(key=_rank, reverse=True)
        if quick:
            return [quick[0], *(plan for plan in quick[1:] if plan.answer_s < _QUICKER * quick[0].answer_s)][:3]
    return []


def _rank(plan: Plan) -> tuple[bool, int]:
    """Return what makes a model better, of those that are quick: a current series, then its size."""
    return is_current(plan.inputs.model), plan.inputs.shape.parameters


def _fitting(tokens: int, plan_of: Callable[[str], Plan]) -> Iterator[Plan]:
    """Yield the plans of free well-known models with room for a sequence of `tokens`."""
    for name in FREE_MODELS:
        try:
            plan = plan_of(name) if KNOWN[name].context >= tokens else None
        except TriforceError:  # such as a GPU that no profile describes
            continue
        is_known = plan is not None and (plan.host.limit is not None or plan.host.total <= _ASSUMED_HOST_BYTES)
        if plan is not None and is_known and plan.fits:
            yield plan


def _inputs_here(name: str, tokens: int, settings: Settings, terminal: Terminal) -> PlanInputs:
    """Return the inputs of a plan of a model on this machine. Raises TriforceError."""
    found, measured = _visible_gpus(), load_measured(terminal)
    profile = profiles.load("cpu") if settings.engine.device == "cpu" else settings.profile
    if profile.name == NO_PROFILE:
        described = profile_of_found(found, measured)
        if described is None:
            raise profiles.undescribed(found)
        profile = described
    hardware = hardware_of(applied(profile, measured, found), found)
    return _inputs_of(name, dimensions(name), tokens, settings, hardware)


def plan_unfetched(request: Request, characters: int, terminal: Terminal) -> PlanReport | None:
    """Return the plan of a well-known model that is not on this machine, for a text of so many characters; else None.

    Raises TriforceError.
    """
    settings, model = request.settings, request.settings.engine.model
    if known_name(model) is None or is_here(model):
        return None
    tokens = characters // CHARACTERS_A_TOKEN + settings.generation.max_new_tokens
    inputs = _inputs_here(model, tokens, settings, terminal)
    return PlanReport(*plan_with_suggestions(inputs), source=describe_source(model), arguments=request.words)
