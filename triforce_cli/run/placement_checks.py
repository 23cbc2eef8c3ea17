"""Whether this machine and this model have the tiers, and the sizes, that the settings ask for."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from offload.architecture.dims import Dimensions
from offload.errors import Degraded, SettingsError
from offload.settings.config import Placement, Speculation
from offload.settings.kv_formats import KV_FORMATS
from offload.settings.method_sizes import MOST_CHUNKS
from offload.system.machine import file_system
from offload.system.scratch_file import ScratchFile

from ..options.lossy_modes import dividing_flags, expert_flags
from ..options.settings import Settings
from ..output.terminal import Terminal

if TYPE_CHECKING:
    from offload.api.opened_model import OpenModel


def check_tiers(model: OpenModel, placement: Placement) -> None:
    """Raise SettingsError for tiers that this machine does not have."""
    on_cpu, link = model.device.type == "cpu", placement.link_gb_s
    if not on_cpu and link is not None:
        raise SettingsError("--link simulates a link on a CPU, and this is a GPU with its own", "leave it out")
    if placement.disk is not None:
        check_folder(Path(placement.disk))
    check_experts(placement, model.checkpoint.shape, on_cpu and link is None)
    model.check_experts(placement.experts)
    if not on_cpu or link is not None:
        return
    for flag in dividing_flags(placement):
        raise SettingsError(
            f"{flag} divides KV between a device and the host, and this device is the CPU",
            "leave it out: a CPU attends to its memory where it is; or simulate a link, such as --link 25",
        )


def warn_of_chunks(
    model: OpenModel,
    settings: Settings,
    methods: Iterable[Speculation],
    tokens: int,
    offloaded: bool,
    terminal: Terminal,
) -> None:
    """Warn of a size of chunks that was asked for, and that sequences of up to `tokens` do not have."""
    if "chunk" not in settings.values:
        return
    for asked, used in dict.fromkeys((each.chunk, model.selected_chunk(each, tokens, offloaded)) for each in methods):
        if used is not None and used != asked:
            why = f"whole blocks of the cache are selected here, and no more than {MOST_CHUNKS:,} chunks"
            terminal.warn(f"--chunk {asked} runs as {used}: {why}")


def check_experts(placement: Placement, shape: Dimensions, has_one_memory: bool) -> None:
    """Raise SettingsError for flags about experts that this model or machine does not have."""
    for flag in expert_flags(placement):
        if shape.experts is None:
            raise SettingsError(f"{flag} is for a mixture of experts, and this model is none", "leave it out")
        if has_one_memory:
            raise SettingsError(
                f"{flag} divides experts between a device and the host, and this device is the CPU",
                "leave it out: a CPU runs experts in its memory where they are; or simulate a link, such as --link 25",
            )


def refuse_unread_format(settings: Settings) -> None:
    """Raise SettingsError if a CPU's retrieval cache would copy keys and values from another tier unquantised."""
    kind, where = settings.speculation.retrieval_kv, settings.placement
    for name, value in {"link": where.link_gb_s, "disk": where.disk}.items():
        if not KV_FORMATS[kind].is_plain and value is not None:
            raise SettingsError(
                f"--retrieval-kv {kind} is for keys and values in memory, and --{name} {value} offloads them",
                "leave one of the two out",
            )


def check_folder(folder: Path) -> None:
    """Raise SettingsError for a folder in which no file for KV can be made; emit a warning for one in memory."""
    ScratchFile(folder, 1)
    if (kind := file_system(folder)) in ("tmpfs", "ramfs"):
        warnings.warn(f"{folder} is in memory ({kind}), and no memory is saved there", Degraded, stacklevel=2)


def free_on_disk(folder: Path) -> int:
    """Return the free bytes on a folder's disk. Raises SettingsError for a folder that does not exist."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise SettingsError(f"--disk {folder}: {(error.strerror or str(error)).lower()}", "name a folder") from error
