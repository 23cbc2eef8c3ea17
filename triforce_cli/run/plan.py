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

from offload.architecture.dims import Dimensions
from offload.architecture.parameters import WeightBits
from offload.architecture.weight_formats import rounded_bits
from offload.errors import SettingsError
from offload.hardware import profiles
from offload.hardware.calibration import Measured, applied
from offload.hardware.profiles import AUTO, Profile, undescribed
from offload.hardware.rates import Hardware, describe, on_threads, placed
from offload.planning.plan import Plan, make_plan
from offload.planning.request import PlanRequest
from offload.planning.suggestions import Suggestion, suggestions
from offload.settings.kv_formats import AUTO as AUTO_KV
from offload.settings.kv_formats import BF16, KV_FORMATS, PACKED_DIMS, PACKED_KV, check_planes, tiered_format
from offload.settings.method_sizes import check_middle
from offload.settings.placement_settings import COPIED_ROWS, PLANES, Placement
from offload.system.machine import free_host_memory, free_memory, usable_cores

from ..distributed.launch import ranks_to_start
from ..options.checks import check_layers, check_tiers, expert_flags, free_on_disk
from ..options.settings import NO_PROFILE, Settings, gpu_names
from ..output.plan_report import suggestions_text
from ..output.plan_text import PlanReport
from ..output.terminal import Terminal
from .measured_rates import load_measured, load_or_measure

if TYPE_CHECKING:
    import torch

    from offload.api.opened_model import OpenModel
    from offload.memory.tier_settings import TierSettings

    from .opened_request import OpenedRequest


def plan_request(
    settings: Settings,
    shape: Dimensions,
    tokens: int,
    hardware: Hardware,
    draft: Dimensions | None = None,
    stored: WeightBits | None = None,
) -> PlanRequest:
    """Return the plan request of the settings, for a model's shape on some hardware.

    `stored`: of a file whose weights stay quantised. Raises SettingsError for --quantize without bf16, and formats that
    the hardware has no kernel for.
    """
    check_layers(settings.placement, shape, hardware.shared and settings.placement.link_gb_s is None)
    level, kv = settings.engine.quantize, settings.engine.kv
    check_middle(settings.speculation, settings.placement.offload == PLANES)
    in_bf16 = settings.engine.dtype in ("auto", "bfloat16") and hardware.dtype == "bf16"
    for option, value in {"--quantize": level, "--kv": kv if KV_FORMATS[kv] is PACKED_KV else None}.items():
        if value is not None and not in_bf16:
            dtype = settings.engine.dtype if settings.engine.dtype != "auto" else hardware.dtype
            raise SettingsError(
                f"{option} {value} needs bfloat16, and {hardware.name} computes in {dtype}", f"leave {option} out"
            )
    packs = in_bf16 and shape.growing.head_dim % PACKED_DIMS == 0
    if KV_FORMATS[kv] is PACKED_KV and is_one_memory(hardware.device, settings.placement):
        kv = BF16
    if settings.placement.offload == PLANES:
        check_planes(tiered_format(kv, packs))
    return PlanRequest(
        model=settings.engine.model,
        shape=shape,
        tokens=tokens,
        hardware=placed(on_threads(hardware, settings.engine.threads), settings.placement),
        placement=settings.placement,
        speculation=settings.speculation,
        prefill_chunk=settings.engine.prefill_chunk,
        itemsize=4 if settings.engine.dtype == "float32" else 2,
        draft=draft,
        weight_bits=stored if level is None else rounded_bits(shape, level),
        quantize=level,
        kv=kv,
        packs=packs,
        packs_on_device=True,
    )


def is_one_memory(device: str, placement: Placement) -> bool:
    """Return whether keys and values are in a CPU's own memory alone, where nothing travels that could be packed."""
    return device == "cpu" and placement.link_gb_s is None and placement.disk is None


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
        request, _ = request_on_this_machine(model, settings, tokens, load_measured(terminal))
    except SettingsError:  # this GPU's rates are unknown
        return opened
    plan = make_plan(request)
    if plan.offload != "none" or plan.request.kv_format is not PACKED_KV:
        return opened
    config = replace(model.config, kv=PACKED_KV.name)
    packed = replace(opened.request, settings=replace(settings, engine=config))
    return replace(opened, model=replace(model, config=config), request=packed)


def plan_with_suggestions(request: PlanRequest) -> tuple[Plan, tuple[Suggestion, ...]]:
    """Return the plan, and changes that would fit if it does not."""
    plan = make_plan(request)
    return plan, () if plan.fits else suggestions(plan.request, _shipped_hardware())


def _shipped_hardware() -> list[Hardware]:
    """Return the hardware of the profiles that come with the program, to choose from."""
    found = []
    for name in profiles.available():
        try:
            found.append(describe(profiles.load(name)))
        except SettingsError:  # its rates are not known
            continue
    return found


def plan_run(model: OpenModel, settings: Settings, tokens: int, terminal: Terminal) -> PlanReport:
    """Return the plan for a sequence of `tokens` on this machine, on as many GPUs as ranks would be started.

    Raises SettingsError for tiers that this machine does not have.
    """
    check_tiers(model, settings.placement)
    measured = load_or_measure(model.device.type == "cuda", terminal, settings.placement.disk)
    request, profile = request_on_this_machine(model, settings, tokens, measured)
    if model.device.type == "cuda" and (count := ranks_to_start(settings)):
        request = replace(request, hardware=replace(request.hardware, gpus=count))
    was_applied = profile.host != settings.profile.host  # the host is always measured
    return PlanReport(*plan_with_suggestions(request), measured if was_applied else None)


def plan_tiers(model: OpenModel, settings: Settings, tokens: int, terminal: Terminal) -> TierSettings | None:
    """Return how the KV cache of a sequence of `tokens` is spread; None where all of it stays on the device.

    Ranks that share the model follow the one with the least room. Raises OutOfMemory with the numbers and what would
    fit, SettingsError for tiers that this machine does not have.
    """
    found = model.group.collect(packed_tiers(_plan_own_tiers(model, settings, tokens, terminal)))
    return fewest_on_device([unpacked_tiers(tiers) for tiers in found if tiers is not None])


def packed_tiers(tiers: TierSettings | None) -> dict[str, Any] | None:
    """Return tiers for JSON."""
    return tiers and asdict(tiers) | {"disk": tiers.disk and str(tiers.disk)}


def unpacked_tiers(values: Mapping[str, Any]) -> TierSettings:
    from offload.memory.tier_settings import TierSettings

    return TierSettings(**{**values, "disk": values["disk"] and Path(values["disk"])})


def fewest_on_device(tiers: list[TierSettings]) -> TierSettings | None:
    """Return the settings that keep the fewest layers' weights, experts, and KV on the device; None without any.

    Of those, it is the one with the least KV in host memory.
    """
    return min(tiers, key=_layers_on_device, default=None)


def _layers_on_device(tiers: TierSettings) -> tuple[float, float, int, int]:
    weights = math.inf if tiers.weight_layers is None else tiers.weight_layers
    experts = math.inf if tiers.experts == "device" else tiers.expert_layers
    return weights, experts, tiers.resident_layers, tiers.host_layers


def _plan_own_tiers(model: OpenModel, settings: Settings, tokens: int, terminal: Terminal) -> TierSettings | None:
    placement = settings.placement
    check_tiers(model, placement)
    if (lossy := settings.speculation.approximate) is not None:  # its keys and values stay on the device
        for flag in expert_flags(placement):
            raise SettingsError(f"{flag} and --approximate {lossy} cannot be used together", "leave one of the two out")
        model.check_fit(tokens, settings.memory_limit(model.device.type))
        return None
    if is_one_memory(model.device.type, placement):
        model.check_fit(tokens, settings.memory_limit("cpu"))
        return None
    try:
        request, _ = request_on_this_machine(model, settings, tokens, load_measured(terminal))
    except SettingsError:  # this GPU's rates are unknown: without them there is no plan, but there may be room
        if placement.offload not in ("auto", "none") or expert_flags(placement):
            raise
        model.check_fit(tokens, settings.memory_limit(model.device.type))
        return None
    plan, suggestions = plan_with_suggestions(replace(request, packs_on_device=False))  # see `packed_by_plan`
    plan.require_fit(suggestions_text(suggestions))
    is_whole = plan.placed.weight_layers == plan.request.shape.layers and not plan.placed.away_layers
    return None if plan.offload == "none" and is_whole else _tier_settings(plan)


def _tier_settings(plan: Plan) -> TierSettings:
    from offload.architecture.tier_footprint import copy_bytes_for
    from offload.memory.tier_settings import TierSettings

    where, placement = plan.placed, plan.request.placement
    mode = plan.offload if placement.offload == "auto" else placement.offload
    mode = "stream" if mode == "none" or where.uses_disk else mode
    return TierSettings(
        mode=mode,
        resident_layers=where.resident_layers,
        share=None if mode == "stream" else placement.host_share,
        by_layers=where.prefill_order == "layers",
        weight_layers=where.weight_layers if where.weight_layers < plan.request.shape.layers else None,
        experts=where.experts,
        expert_layers=plan.request.shape.experts.layers - where.away_layers if where.away_layers else 0,
        expert_rows=where.streamed_rows or COPIED_ROWS,
        link_gb_s=placement.link_gb_s,
        copy_bytes=copy_bytes_for(plan.request.hardware.link),
        disk=Path(placement.disk) if where.uses_disk else None,
        host_layers=0 if plan.request.has_one_memory else _host_layers(plan),
    )


def _host_layers(plan: Plan) -> int:
    """Return how many layers have their KV in host memory beside a device."""
    where = plan.placed
    return plan.request.shape.kv_layers - where.resident_layers - where.disk_layers


def request_on_this_machine(
    model: OpenModel, settings: Settings, tokens: int, measured: Measured | None
) -> tuple[PlanRequest, Profile]:
    """Return the request for a plan of a sequence of `tokens` on this machine, and the profile with its rates.

    Raises SettingsError as `rated_profile`.
    """
    profile = rated_profile(model.device, settings.profile, measured)
    hardware = this_machine(model.device, profile, model.group.mates, settings.placement.disk)
    request = plan_request(settings, model.shape, tokens, hardware, model.draft_dimensions)
    in_place = model.kernel != "off" and settings.placement.link_gb_s is None
    request = replace(
        request,
        itemsize=model.dtype.itemsize,
        retrieves_in_place=in_place,
        has_triton=find_spec("triton") is not None,
        host_computes=model.host_computes,
        packs=model.packs,
        weight_bits=model.weight_bits,
    )
    if settings.placement.memory is not None:
        beside_cache = replace(request.placement, memory=settings.memory_limit(model.device.type))
        request = replace(request, placement=beside_cache)
    return request, profile


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
    return replace(profile, name=AUTO if profile.device == "cuda" else "cpu")  # the name that --profile takes


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
