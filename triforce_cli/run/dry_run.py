"""`--dry-run`: the plan of a request whose model has been opened, on the machine that it would run on."""

from __future__ import annotations

from dataclasses import replace

import torch

from offload.config import Placement
from offload.errors import SettingsError
from offload.hardware.calibration import Measured, applied
from offload.hardware.profiles import AUTO, Profile, undescribed
from offload.hardware.rates import Hardware, describe
from offload.loader import OpenModel
from offload.planning.placement import PlanRequest
from offload.system import cores, free_host_memory, free_memory

from ..distributed.launch import ranks_to_start
from ..options.settings import NO_PROFILE, Settings, gpu_names
from ..output.terminal import Terminal
from .calibration import saved
from .planning import plan_with_ways, request_for, tell


def tell_dry_run(opened: OpenModel, settings: Settings, tokens: int, terminal: Terminal, json: bool) -> int:
    """What would lie where for a sequence of `tokens`, and how fast it would be; exit code 1 if it does not fit."""
    check_tiers(opened, settings.placement)
    measured = saved(terminal)
    request, profile = request_of(opened, settings, tokens, measured)
    if opened.device.type == "cuda" and (count := ranks_to_start(settings)):
        request = replace(request, hardware=replace(request.hardware, gpus=count))
    plan, ways = plan_with_ways(request)
    used = measured if profile.host != settings.profile.host else None  # the host is always measured
    return tell(plan, ways, terminal, None, used, json)


def check_tiers(opened: OpenModel, placement: Placement) -> None:
    """Raises SettingsError for tiers that this machine has not."""
    on_cpu, link = opened.device.type == "cpu", placement.link_gb_s
    if not on_cpu and link is not None:
        raise SettingsError("--link simulates a link on a CPU, and this is a GPU with its own", "leave it out")
    if not on_cpu or link is not None:
        return
    asked = {"resident-layers": placement.resident_layers, "host-share": placement.host_share}
    asked["offload"] = placement.offload if placement.offload not in ("auto", "none") else None
    for name, value in asked.items():
        if value is not None:
            raise SettingsError(
                f"--{name} {value} divides KV between a device and the host, and this device is the CPU",
                "leave it out: a CPU attends to its memory where it is; or simulate a link, such as --link 25",
            )


def request_of(
    opened: OpenModel, settings: Settings, tokens: int, measured: Measured | None
) -> tuple[PlanRequest, Profile]:
    """What a plan is asked for a sequence of `tokens` on this machine, and the profile with its rates.

    Raises SettingsError as `rated`.
    """
    profile = rated(opened.device, settings.profile, measured)
    draft = opened.draft.shape if opened.draft is not None else None
    hardware = this_machine(opened.device, profile, opened.group.mates)
    request = request_for(settings, opened.shape, tokens, hardware, draft)
    in_place = opened.kernel != "off" and settings.placement.link_gb_s is None
    return replace(request, itemsize=opened.dtype.itemsize, retrieves_in_place=in_place), profile


def rated(device: torch.device, profile: Profile, measured: Measured | None) -> Profile:
    """The profile of what computes, with the rates that were measured on it.

    Raises SettingsError for a GPU that no profile describes and nobody has measured.
    """
    profile = applied(profile, measured, gpu_names())
    if device.type == "cpu" and profile.device != "cpu":  # asked for by --device: the profile's host is what computes
        profile = applied(replace(profile, device="cpu", gpus=0, gpu=None, link=None), measured)
    if profile.name != NO_PROFILE:
        return profile
    if profile.device == "cuda" and profile.gpu is None:
        raise undescribed([torch.cuda.get_device_name(device)])
    return replace(profile, name=AUTO if profile.device == "cuda" else "cpu")  # by which it can be asked for


def this_machine(device: torch.device, profile: Profile, mates: int = 1) -> Hardware:
    """The profile's rates, and the memory that is really free, of which `mates` ranks each take their part."""
    hardware = replace(describe(profile, free_host_memory() // mates, cores()), gpus=1)
    free = free_memory(device) // (mates if hardware.shared else 1)
    memory = free if hardware.memory is None else min(free, hardware.memory)
    return replace(hardware, memory=memory, host_memory=memory if hardware.shared else hardware.host_memory)
