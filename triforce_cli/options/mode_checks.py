"""Lossy modes and offloading: the flags for them, what excludes what, also on this machine, and what is said then."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import Degraded, SettingsError
from offload.settings.config import Placement
from offload.settings.kv_formats import LOSSY_KV
from offload.settings.method_sizes import forgetting_capacity
from offload.units import counted

from .settings import Settings

if TYPE_CHECKING:
    from offload.api.opened_model import OpenModel
    from offload.architecture.dims import Dimensions


def lossy_modes(settings: Settings) -> tuple[str, ...]:
    """Return the flags that change the answer, such as `--kv q8`; none for an exact run."""
    found = {"--approximate": settings.speculation.approximate, "--kv": quantized_kv(settings)}
    return tuple(f"{flag} {mode}" for flag, mode in found.items() if mode is not None)


def quantized_kv(settings: Settings) -> str | None:
    """Return the format to which keys and values are quantised, or None."""
    return settings.engine.kv if settings.engine.kv in LOSSY_KV else None


def refuse_inexact(settings: Settings, params: Mapping[str, Any]) -> None:
    """Raise SettingsError for flags that need an exact answer, or all keys and values, where there are none."""
    modes = lossy_modes(settings)
    if not modes:
        return
    mode = " and ".join(modes)
    if params.get("verify"):
        raise SettingsError(
            f"--verify compares with exact decoding, and {mode} changes the answer",
            "leave one of the two out",
        )
    if params["dry_run"] and settings.speculation.approximate is not None:
        raise SettingsError(f"--dry-run plans exact decoding, not {mode}", "leave one of the two out")
    if settings.speculation.approximate is None:
        return
    where = settings.placement
    for flag in (*dividing_flags(where), *_given({"link": where.link_gb_s, "disk": where.disk})):
        raise SettingsError(
            f"{flag} offloads keys and values, and those of {mode} stay on the device", "leave one of the two out"
        )


def dividing_flags(where: Placement) -> list[str]:
    """Return the flags that divide keys and values between a device and the host."""
    offload = where.offload if where.offload not in ("auto", "none") else None
    return _given({"offload": offload, "resident-layers": where.resident_layers, "host-share": where.host_share})


def expert_flags(where: Placement) -> list[str]:
    """Return the flags that ask for experts in host memory, beside a device."""
    experts = None if where.experts in ("auto", "device") else where.experts
    return _given({"experts": experts})


def _given(options: Mapping[str, Any]) -> list[str]:
    return [f"--{name} {value}" for name, value in options.items() if value is not None]


def approximation_warnings(settings: Settings) -> Iterator[str]:
    """Yield what a lossy run has to say before its text."""
    speculation = settings.speculation
    mode = speculation.approximate
    if kv := quantized_kv(settings):
        yield f"--kv {kv} changes the answer: the model attends to rounded keys and values"
    if mode is None:
        return
    most = counted(forgetting_capacity(speculation), "token")
    yield f"--approximate {mode} changes the answer: the model attends to {most} at most, and forgets others"


def check_tiers(model: OpenModel, placement: Placement) -> None:
    """Raise SettingsError for tiers that this machine does not have."""
    on_cpu, link = model.device.type == "cpu", placement.link_gb_s
    if not on_cpu and link is not None:
        raise SettingsError("--link simulates a link on a CPU, and this is a GPU with its own", "leave it out")
    if placement.disk is not None:
        check_folder(Path(placement.disk))
    check_layers(placement, model.checkpoint.shape, on_cpu and link is None)
    model.check_experts(placement.experts)
    if not on_cpu or link is not None:
        return
    for flag in dividing_flags(placement):
        raise SettingsError(
            f"{flag} divides KV between a device and the host, and this device is the CPU",
            "leave it out: a CPU attends to its memory where it is; or simulate a link, such as --link 25",
        )


def check_layers(placement: Placement, shape: Dimensions, has_one_memory: bool) -> None:
    """Raise SettingsError for more layers than this model has, and experts that it or this machine does not have."""
    for flag in expert_flags(placement):
        if shape.experts is None:
            raise SettingsError(f"{flag} is for a mixture of experts, and this model is none", "leave it out")
        if has_one_memory:
            raise SettingsError(
                f"{flag} divides experts between a device and the host, and this device is the CPU",
                "leave it out: a CPU runs experts in its memory where they are; or simulate a link, such as --link 25",
            )
    asked, layers = placement.resident_layers, shape.kv_layers
    if asked is not None and asked > layers:
        wrong = f"--resident-layers is {asked:,}, and {layers} layers of this model have a KV cache of all tokens"
        raise SettingsError(wrong, f"use {layers} or fewer, or leave it out for as many as fit")


def check_folder(folder: Path) -> None:
    """Raise SettingsError for a folder in which no file for KV can be made; emit a warning for one in memory."""
    from offload.system.machine import file_system
    from offload.system.scratch_file import ScratchFile

    ScratchFile(folder, 1)
    if (kind := file_system(folder)) in ("tmpfs", "ramfs"):
        warnings.warn(f"{folder} is in memory ({kind}), and no memory is saved there", Degraded, stacklevel=2)


def free_on_disk(folder: Path) -> int:
    """Return the free bytes on a folder's disk. Raises SettingsError for a folder that does not exist."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise SettingsError(f"--disk {folder}: {(error.strerror or str(error)).lower()}", "name a folder") from error
