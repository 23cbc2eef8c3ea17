"""Collects facts about this machine and this installation for `triforce doctor`, and measures two rates."""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from ..architecture.families import FAMILIES
from ..errors import SettingsError
from ..hardware.microbenchmarks import link_rate, read_rate
from ..kernels.native import LEVELS, KernelUnavailable, find_kernel, use_threads
from ..loading.hub.bundled import bytes_below
from ..settings.config import EngineConfig
from ..system.machine import default_home, free_memory
from .loader import resolve_device


def examine(config: EngineConfig, home: Path | None = None, measure: bool = True) -> dict[str, Any]:
    """Return the facts by their names, as `doctor --json` writes them: sizes in bytes, rates in 10^9 bytes a second.

    Sets torch's number of threads to that of `config`. `home` is triforce's cache folder; None for the platform's.
    `measure`: the rates too, which takes a second and up to a quarter of the free memory; else they are None.
    """
    use_threads(config.threads)
    free = free_memory(torch.device("cpu"))
    cores = {"cores": psutil.cpu_count(logical=False), "logical_cores": psutil.cpu_count()}
    rate = read_rate(free) if measure else None
    return {
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("triforce", "torch", "transformers")},
        "device": _device(config.device, measure),
        "processor": {**cores, "threads": torch.get_num_threads()},
        "memory": {"total_bytes": psutil.virtual_memory().total, "free_bytes": free, "read_gb_s": rate},
        "kernel": kernel_state(config.kernel),
        "families": list(FAMILIES),
        "cache": _models(home or default_home()),
    }


def _device(asked: str, measure: bool) -> dict[str, Any]:
    used, reason = None, ""
    try:
        used = resolve_device(asked).type
    except SettingsError as error:
        reason = error.message
    gpus = [_gpu(index, measure) for index in range(torch.cuda.device_count())]
    return {"asked": asked, "used": used, "reason": reason, "gpus": gpus}


def _gpu(index: int, measure: bool) -> dict[str, Any]:
    device = torch.device("cuda", index)
    free, total = torch.cuda.mem_get_info(device)
    link = link_rate(device, free) if measure else None
    name = torch.cuda.get_device_name(device)
    return {"name": name, "memory_bytes": total, "free_bytes": free, "link_gb_s": link}


def kernel_state(asked: str) -> dict[str, Any]:
    """Return the level of the native kernel that is used for `EngineConfig.kernel`, or None with a reason, and all."""
    levels, reason = [], ""
    for level in LEVELS:
        try:
            levels.append(find_kernel(level).level)
        except KernelUnavailable as error:
            reason = " ".join(str(error).split())  # compiler errors have many lines
    if asked == "off":
        reason = "switched off"
    elif levels:
        reason = "" if asked in ("auto", *levels) else f"this processor has no {asked}"
    used = None if reason else levels[0] if asked == "auto" else asked
    return {"asked": asked, "level": used, "reason": reason, "levels": levels}


def _models(home: Path) -> dict[str, Any]:
    """Return what is in triforce's cache folder, which may not exist yet."""
    folder = home / "models"
    found = sorted(path for path in folder.iterdir() if path.name[0] != ".") if folder.is_dir() else []
    return {"folder": home, "models": {path.name: bytes_below(path) for path in found}}
