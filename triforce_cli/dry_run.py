"""`--dry-run`: the plan of a request whose model has been opened, on the machine that it would run on."""

from __future__ import annotations

from dataclasses import replace

import torch

from offload.memory import available
from offload.opening import OpenModel
from offload.placement import PlanRequest
from offload.resources import Hardware, describe
from offload.system import cores, free_host_memory

from .planning import plan_with_ways, request_for, tell
from .settings import Settings
from .terminal import Terminal


def tell_dry_run(opened: OpenModel, settings: Settings, tokens: int, terminal: Terminal, json: bool) -> int:
    """What would lie where for a sequence of `tokens`, and how fast it would be; exit code 1 if it does not fit."""
    plan, ways = plan_with_ways(request_of(opened, settings, tokens))
    return tell(plan, ways, terminal, None, json)


def request_of(opened: OpenModel, settings: Settings, tokens: int) -> PlanRequest:
    """What a plan is asked for a sequence of `tokens` on this machine."""
    draft = opened.draft.shape if opened.draft is not None else None
    hardware = this_machine(opened.device, settings)
    request = request_for(settings, opened.checkpoint.shape, tokens, hardware, draft)
    return replace(request, itemsize=opened.dtype.itemsize)


def this_machine(device: torch.device, settings: Settings) -> Hardware:
    """The profile's rates, and the memory that is really free; one GPU, as long as only one is used."""
    profile = settings.profile
    if device.type == "cpu" and profile.device != "cpu":  # asked for by --device: the profile's host is what computes
        profile = replace(profile, device="cpu", gpus=0, gpu=None, link=None)
    hardware = replace(describe(profile, free_host_memory(), cores()), gpus=1)
    free = available(device)
    memory = free if hardware.memory is None else min(free, hardware.memory)
    return replace(hardware, memory=memory, host_memory=memory if hardware.shared else hardware.host_memory)
