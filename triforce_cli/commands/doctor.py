"""`triforce doctor`: describes this machine and this installation, and whether the native kernel can be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.prompt_cache.entries import entries
from offload.settings.config import check_part
from offload.units import GIB, counted

from ..options import declarations as options
from ..options.mode_checks import free_on_disk
from ..options.settings import given_options, resolve
from ..output.stdout_formats import json_line
from ..run.measured_rates import load_or_measure, measure_disk
from ..run.prompt_cache import prompt_folder

if TYPE_CHECKING:
    from offload.api.diagnosis import Device, Families, KernelState, Memory, ModelCache, Processor, Report, Versions

    from ..output.terminal import Terminal


@dataclass(frozen=True, slots=True)
class CachedPrompts:
    """The entries of the prompt cache, and the bytes that they take and may take."""

    folder: Path
    entries: int
    size_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk of --disk. `read_gb_s` is 10^9 bytes a second of large reads; None if it was not measured."""

    folder: Path
    free_bytes: int
    read_gb_s: float | None


@options.accepts(options.chosen("profile device kernel threads disk"))
def doctor(
    ctx: typer.Context,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Do not measure memory bandwidth.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Describe this machine and this installation, and whether the native kernel can be used.

    Settings are resolved as `generate` resolves them. A missing kernel is not an error: torch is used instead.

    [bold]Examples[/bold]

      triforce doctor

      triforce doctor --kernel portable

      triforce doctor --no-measure --json

      triforce doctor --disk /mnt/nvme
    """
    flags, origins = given_options(ctx)
    check_part(flags)
    settings = resolve(flags, origins, ctx.params["profile"])

    import torch

    from offload.api.diagnosis import examine

    from ..run.processor import processor

    terminal = ctx.obj.terminal
    report = examine(settings.engine, processor(torch.device("cpu")), ctx.obj.home, measure=not no_measure)
    prompts = _examine_prompts(ctx.obj.home, settings.caching.cache_limit)
    disk = _examine_disk(settings.placement.disk, not no_measure, report, terminal)
    if json:
        terminal.write(json_line(type="doctor", **asdict(report), disk=disk and asdict(disk), prompts=asdict(prompts)))
        return
    rows = [*_rows(report, settings.origins), *_disk(disk), ("prompts", _prompts(prompts))]
    width = max(len(name) for name, _ in rows)
    terminal.write("".join(f"{name:<{width}}  {text}\n" for name, text in rows))


def _examine_disk(folder: str | None, measure: bool, report: Report, terminal: Terminal) -> Disk | None:
    """Return the facts about the disk of a folder; a measured rate is saved for plans. Raises SettingsError."""
    if folder is None:
        return None
    free, rate = free_on_disk(Path(folder)), None
    if measure:
        measured = load_or_measure(report.device.used == "cuda", terminal)
        measured = measured and measure_disk(folder, measured, terminal)
        rate = measured and measured.host.disk_gb_s
    return Disk(Path(folder), free, rate)


def _disk(disk: Disk | None) -> Iterator[tuple[str, str]]:
    if disk is not None:
        rate = "" if disk.read_gb_s is None else f", read at {disk.read_gb_s:.1f} GB/s"
        yield "disk", f"{_gib(disk.free_bytes)} free{rate}, {disk.folder}"


def _rows(report: Report, origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each line; continuation lines have no name."""
    yield "triforce", _versions(report.versions)
    yield from _device(report.device, origins)
    yield "processor", report.processor.name
    yield "cores", _cores(report.processor)
    yield "memory", _memory(report.memory)
    yield from _kernel(report.kernel, origins)
    yield "OpenMP", "yes" if report.versions.openmp else "no: torch was built without it"
    yield from _families(report.families)
    yield "drafts", "; ".join(f"{draft} for {vocabulary}" for vocabulary, draft in report.draft_models.items())
    yield from _cache(report.cache)


def _families(families: Families) -> Iterator[tuple[str, str]]:
    """Yield which models load, and for which of them the kernel needs help."""
    yield "families", ", ".join(families.native)
    yield "", f"{', '.join(families.mixed)} (torch runs some operations of their layers)"


def _versions(versions: Versions) -> str:
    others = f"Python {versions.python}, torch {versions.torch}, transformers {versions.transformers}"
    return f"{versions.triforce} ({others})"


def _requested(name: str, value: str, origins: Mapping[str, str]) -> str:
    return f"asked for: {value}, by {origins[name]}" if name in origins else f"asked for: {value}"


def _device(device: Device, origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield "device", f"{device.used or f'none: {device.reason}'} ({_requested('device', device.asked, origins)})"
    for number, gpu in enumerate(device.gpus):
        sizes = f"{_gib(gpu.memory_bytes)}, {_gib(gpu.free_bytes)} free"
        link = "" if gpu.link_gb_s is None else f", link {gpu.link_gb_s:.1f} GB/s"
        yield f"GPU {number}", f"{gpu.name}, {sizes}{link}"


def _cores(processor: Processor) -> str:
    physical = "" if processor.cores is None else f"{processor.cores} physical, "
    return f"{physical}{processor.logical_cores or '?'} logical, {counted(processor.threads, 'thread')} for torch"


def _memory(memory: Memory) -> str:
    rate = "" if memory.read_gb_s is None else f", read at {memory.read_gb_s:.1f} GB/s"
    return f"{_gib(memory.total_bytes)}, {_gib(memory.free_bytes)} free{rate}"


def _kernel(kernel: KernelState, origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield "kernel", f"{kernel.level or f'none: {kernel.reason}'} ({_requested('kernel', kernel.asked, origins)})"
    if kernel.hint:
        yield "", f"hint: {kernel.hint}"
    yield "levels", ", ".join(kernel.levels) or "none"


def _examine_prompts(home: Path | None, limit: int) -> CachedPrompts:
    folder = prompt_folder(home, limit)
    return CachedPrompts(folder.path, len(entries(folder)), sum(block.size for block in folder.blocks()), limit)


def _prompts(prompts: CachedPrompts) -> str:
    count = counted(prompts.entries, "cached prompt")
    return f"{count}, {_gib(prompts.size_bytes)} of {_gib(prompts.limit_bytes)}, {prompts.folder}"


def _cache(cache: ModelCache) -> Iterator[tuple[str, str]]:
    size = sum(model.size_bytes for model in cache.models)
    yield "models", f"{counted(len(cache.models), 'model')}, {_gib(size)}, {cache.folder / 'models'}"
    for model in cache.models:
        yield "", f"{model.name}, {_gib(model.size_bytes)}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
