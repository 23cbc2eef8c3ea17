"""Collects facts about this machine and this installation, for `triforce doctor`."""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from ..architecture.families import FAMILIES
from ..errors import SettingsError
from ..kernels.native import LEVELS, KernelUnavailable, find_kernel, use_threads
from ..settings.config import EngineConfig
from ..system.machine import default_home, free_memory
from .loader import resolve_device


def examine(config: EngineConfig, home: Path | None = None) -> dict[str, Any]:
    """Return the facts by their names, as `doctor --json` writes them: sizes in bytes.

    Sets torch's number of threads to that of `config`. `home` is triforce's cache folder; None for the platform's.
    """
    use_threads(config.threads)
    device: dict[str, Any] = {"asked": config.device, "used": None, "reason": "", "gpus": []}
    try:
        device["used"] = resolve_device(config.device).type
    except SettingsError as error:
        device["reason"] = error.message
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        device["gpus"].append({"name": torch.cuda.get_device_name(index), "memory_bytes": total, "free_bytes": free})
    memory = {"total_bytes": psutil.virtual_memory().total, "free_bytes": free_memory(torch.device("cpu"))}
    cores = {"cores": psutil.cpu_count(logical=False), "logical_cores": psutil.cpu_count()}
    versions = {name: version(name) for name in ("triforce", "torch", "transformers")}
    return {
        "versions": versions | {"python": platform.python_version()},
        "device": device,
        "processor": cores | {"threads": torch.get_num_threads()},
        "memory": memory,
        "kernel": kernel_state(config.kernel),
        "families": list(FAMILIES),
        "cache": {"folder": home or default_home()},
    }


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
