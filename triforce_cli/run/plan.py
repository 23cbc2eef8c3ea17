"""Plans a run before anything is loaded: what lies where, how fast it will be, how the KV cache is spread.

Real runs and dry runs plan here alike. Torch is imported only where a model has been opened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.architecture.dims import Dimensions, WeightBits
from offload.architecture.pages import copy_bytes_for
from offload.architecture.weight_formats import rounded_bits
from offload.errors import SettingsError
from offload.hardware.calibration import Measured, applied
from offload.hardware.profiles import AUTO, Profile, undescribed
from offload.hardware.rates import Hardware, describe, on_threads, with_link
from offload.planning.inputs import PlanInputs
from offload.planning.plan import Plan, make_plan
from offload.planning.suggestions import suggestions
from offload.settings.kv_formats import AUTO as AUTO_KV
from offload.settings.kv_formats import BF16, KV_FORMATS, PACKED_DIMS, PACKED_KV, check_planes, tiered_format
from offload.settings.method_sizes import check_middle
from offload.settings.placement_settings import COPIED_ROWS, PLANES, Placement
from offload.system.machine import free_host_memory, free_memory, usable_cores

from ..distributed.launch import ranks_to_start
from ..options.checks import check_layers, check_tiers, expert_flags, free_on_disk
from ..options.settings import NO_PROFILE, Settings, gpu_names
from ..output.plan_text import PlanReport, suggestions_text
from ..output.terminal import Terminal
from .finished_runs import corrected
from .measured_rates import load_measured, load_or_measure

if TYPE_CHECKING:
    import torch

    from offload.api.opened_model import OpenModel
    from offload.memory.tier_settings import TierSettings

    from .opened_request import OpenedRequest


def plan_inputs(
    settings: Settings,
    shape: Dimensions,
    tokens: int,
    hardware: Hardware,
    draft: Dimensions | None = None,
    stored: WeightBits | None = None,
) -> PlanInputs:
    """Return the inputs of a plan with the settings, for a model's shape on some hardware.

    `stored`: of a file whose weights stay quantised. Raises SettingsError for --quantize without bf16, and formats that
    the hardware has no kernel for.
    """
    engine, placement = settings.engine, settings.placement
    check_layers(placement, shape, hardware.shared and placement.link_gb_s is None)
    check_middle(settings.speculation, placement.offload == PLANES)
    in_bf16, kv = engine.dtype in ("auto", "bfloat16") and hardware.dtype == "bf16", engine.kv
    for option, value in {"--quantize": engine.quantize, "--kv": kv if KV_FORMATS[kv] is PACKED_KV else None}.items():
        if value is not None and not in_bf16:
            dtype = engine.dtype if engine.dtype != "auto" else hardware.dtype
            message = f"{option} {value} needs bfloat16, and {hardware.name} computes in {dtype}"
            raise SettingsError(message, f"leave {option} out")
    packs = in_bf16 and shape.full_attention.head_dim % PACKED_DIMS == 0
    if KV_FORMATS[kv] is PACKED_KV and is_one_memory(hardware.device, placement):
        kv = BF16
    if placement.offload == PLANES:
        check_planes(tiered_format(kv, packs))
    return PlanInputs(
        model=engine.model,
        shape=shape,
        tokens=tokens,
        hardware=with_link(on_threads(hardware, engine.threads), placement),
        placement=placement,
        speculation=settings.speculation,
        prefill_chunk=engine.prefill_chunk,
        itemsize=4 if engine.dtype == "float32" else 2,
        draft=draft,
        weight_bits=stored if engine.quantize is None else rounded_bits(shape, engine.quantize),
        quantize=engine.quantize,
        kv=kv,
        packs=packs,
        packs_on_device=True,
    )


def is_one_memory(device: str, placement: Placement) -> bool:
    """Return whether keys and values are in a CPU's own memory alone, where nothing travels that could be packed."""
    return device == "cpu" and placement.link_gb_s is None and placement.disk is None


def plan_with_suggestions(inputs: PlanInputs) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan, and changes that would fit if it does not, in words."""
    plan = make_plan(inputs)
    return plan, () if plan.fits else tuple(text for text, _ in suggestions(plan.inputs))


def plan_run(model: OpenModel, settings: Settings, tokens: int, terminal: Terminal) -> PlanReport:
    """Return the plan for a sequence of `tokens` on this machine, on as many GPUs as ranks would be started.

    Raises SettingsError for tiers that this machine does not have.
    """
    check_tiers(model, settings.placement)
    measured = load_or_measure(model.device.type == "cuda", terminal, settings.placement.disk)
    inputs, profile = _inputs_here(model, settings, tokens, measured)
    if model.device.type == "cuda" and (count := ranks_to_start(settings)):
        inputs = replace(inputs, hardware=replace(inputs.hardware, gpus=count))
    was_applied = profile.host != settings.profile.host  # the host is always measured
    plan, changes = plan_with_suggestions(inputs)
    return PlanReport(corrected(plan), changes, measured if was_applied else None)


def packed_by_plan(opened: OpenedRequest, tokens: int, terminal: Terminal) -> OpenedRequest:
    """Return the request with packed keys and values if the plan for `tokens` keeps them on one GPU, and none others.

    Where nothing travels, a CPU's are not packed, and a warning says so. Ranks that share a model need one format.
    """
    model, settings = opened.model, opened.settings
    kv, device = settings.engine.kv, model.device.type
    if KV_FORMATS[kv] is PACKED_KV and is_one_memory(device, settings.placement):
        terminal.warn(f"--kv {kv} has no effect here: it packs what is copied over a link or read from disk")
    if kv != AUTO_KV or device != "cuda" or model.group.size > 1 or settings.speculation.approximate is not None:
        return opened
    try:
        plan = make_plan(_inputs_here(model, settings, tokens, load_measured(terminal))[0])
    except SettingsError:  # this GPU's rates are unknown
        return opened
    if plan.offload != "none" or plan.inputs.kv_format is not PACKED_KV:
        return opened
    config = replace(model.config, kv=PACKED_KV.name)
    packed = replace(opened.request, settings=replace(settings, engine=config))
    return replace(opened, model=replace(model, config=config), request=packed)


def plan_tiers(model: OpenModel, settings: Settings, tokens: int, terminal: Terminal) -> TierSettings | None:
    """Return how the KV cache of a sequence of `tokens` is spread; None where all of it stays on the device.

    Ranks that share the model follow the one with the least room. Raises OutOfMemory with the numbers and what would
    fit, SettingsError for tiers that this machine does not have.
    """
    own = model.group.collect(packed_tiers(_own_tiers(model, settings, tokens, terminal)))
    return fewest_on_device([unpacked_tiers(tiers) for tiers in own if tiers is not None])


def packed_tiers(tiers: TierSettings | None) -> dict[str, Any] | None:
    """Return tiers for JSON."""
    return None if tiers is None else asdict(tiers) | {"disk": tiers.disk and str(tiers.disk)}


def unpacked_tiers(values: Mapping[str, Any]) -> TierSettings:
    from offload.memory.tier_settings import TierSettings

    return TierSettings(**{**values, "disk": values["disk"] and Path(values["disk"])})


def fewest_on_device(tiers: list[TierSettings]) -> TierSettings | None:
    """Return the settings that keep the fewest layers' weights, experts, and KV on the device; None without any.

    Of those, it is the one with the least KV in host memory.
    """

    def layers(own: TierSettings) -> tuple[float, float, int, int]:
        weights = math.inf if own.weight_layers is None else own.weight_layers
        experts = math.inf if own.experts == "device" else own.expert_layers
        return weights, experts, own.resident_layers, own.host_layers

    return min(tiers, key=layers, default=None)


def _own_tiers(model: OpenModel, settings: Settings, tokens: int, terminal: Terminal) -> TierSettings | None:
    """Return this rank's tiers; as `plan_tiers`."""
    placement, lossy = settings.placement, settings.speculation.approximate
    check_tiers(model, placement)
    hosted = expert_flags(placement)
    if lossy is not None and hosted:
        message = f"{hosted[0]} and --approximate {lossy} cannot be used together"
        raise SettingsError(message, "leave one of the two out")
    inputs = None
    if lossy is None and not is_one_memory(model.device.type, placement):  # else all KV stays on the device
        try:
            inputs, _ = _inputs_here(model, settings, tokens, load_measured(terminal))
        except SettingsError:  # this GPU's rates are unknown: without them there is no plan, but there may be room
            if placement.offload not in ("auto", "none") or hosted:
                raise
    if inputs is None:
        model.check_fit(tokens, settings.memory_limit(model.device.type))
        return None
    plan, changes = plan_with_suggestions(replace(inputs, packs_on_device=False))  # see `packed_by_plan`
    plan.require_fit(suggestions_text(changes))
    return None if plan.offload == "none" and plan.is_whole else _tier_settings(plan)


def _tier_settings(plan: Plan) -> TierSettings:
    from offload.memory.tier_settings import TierSettings

    where, placement, shape = plan.placed, plan.inputs.placement, plan.inputs.shape
    mode = plan.offload if placement.offload == "auto" else placement.offload
    mode = "stream" if mode == "none" or where.uses_disk else mode
    away = where.away_layers
    return TierSettings(
        mode=mode,
        resident_layers=where.resident_layers,
        share=None if mode == "stream" else placement.host_share,
        by_layers=where.by_layers,
        weight_layers=where.weight_layers if where.weight_layers < shape.layers else None,
        experts="host" if away else "device",
        expert_layers=shape.experts.layers - away if shape.experts and away else 0,
        expert_rows=where.streamed_rows or COPIED_ROWS,
        link_gb_s=placement.link_gb_s,
        copy_bytes=copy_bytes_for(plan.inputs.hardware.link),
        disk=Path(placement.disk) if placement.disk and where.uses_disk else None,
        host_layers=0 if plan.inputs.has_one_memory else shape.kv_layers - where.resident_layers - where.disk_layers,
    )


def _inputs_here(
    model: OpenModel, settings: Settings, tokens: int, measured: Measured | None
) -> tuple[PlanInputs, Profile]:
    """Return the inputs for a plan of a sequence of `tokens` on this machine, and the profile with its rates.

    Raises SettingsError as `rated_profile`.
    """
    device = model.device.type
    profile = rated_profile(model.device, settings.profile, measured)
    hardware = this_machine(model.device, profile, model.group.mates, settings.placement.disk)
    inputs = plan_inputs(settings, model.shape, tokens, hardware, model.draft_dimensions)
    inputs = replace(
        inputs,
        itemsize=model.dtype.itemsize,
        lists_chunks=find_spec("triton") is not None,
        host_computes=model.host_computes,
        packs=model.packs,
        weight_bits=model.weight_bits,
    )
    if device == "cpu":
        inputs = replace(inputs, lists_chunks=model.kernel != "off" and settings.placement.link_gb_s is None)
    if settings.placement.memory is not None:
        beside_cache = replace(inputs.placement, memory=settings.memory_limit(device))
        inputs = replace(inputs, placement=beside_cache)
    return inputs, profile


def rated_profile(device: torch.device, profile: Profile, measured: Measured | None) -> Profile:
    """Return the profile of the device that computes, with the rates that were measured on it.

    Raises SettingsError for a GPU that neither a profile nor a measurement describes.
    """
    profile = applied(profile, measured, gpu_names())
    if device.type == "cpu" and profile.device != "cpu":  # asked for by --device: the profile's host computes
        profile = applied(replace(profile, device="cpu", gpus=0, gpu=None, link=None), measured)
    if profile.name != NO_PROFILE:
        return profile
    if profile.device == "cuda" and profile.gpu is None:
        import torch

        raise undescribed([torch.cuda.get_device_name(device)])
    return replace(profile, name=AUTO if profile.device == "cuda" else "cpu")  # the name that --gpu takes


def this_machine(device: torch.device, profile: Profile, local_ranks: int = 1, disk: str | None = None) -> Hardware:
    """Return the profile's rates with the memory that is really free, divided among the ranks on this machine.

    `disk`: a folder whose disk's free space is divided likewise.
    """
    hardware = replace(describe(profile, free_host_memory() // local_ranks, usable_cores()), gpus=1)
    free = free_memory(device) // (local_ranks if hardware.shared else 1)
    memory = free if hardware.memory is None else min(free, hardware.memory)
    if disk is not None:
        hardware = replace(hardware, disk_free=free_on_disk(Path(disk)) // local_ranks)
    return replace(hardware, memory=memory, host_memory=memory if hardware.shared else hardware.host_memory)
