"""`triforce doctor`: describes this machine and this installation, and whether the native kernel can be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.prompt_cache.entries import entries
from offload.settings.config import check_part
from offload.units import GIB, counted

from ..options import declarations as options
from ..options.mode_checks import free_on_disk
from ..options.settings import given_options, resolve
from ..output.stdout_formats import json_line
from ..output.tables import hanging
from ..run.measured_rates import load_or_measure, measure_disk, measure_packing
from ..run.processor import processor
from ..run.prompt_cache import prompt_folder

if TYPE_CHECKING:
    from offload.api.diagnosis import Report

    from ..output.terminal import Terminal


@options.accepts(options.chosen("profile device kernel threads disk"))
def doctor(
    ctx: typer.Context,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Do not measure memory, nor attention.")] = False,
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

    terminal = ctx.obj.terminal
    report = examine(settings.engine, processor(torch.device("cpu")), ctx.obj.home, measure=not no_measure)
    folder = prompt_folder(ctx.obj.home, settings.caching.cache_limit)
    size = sum(block.size for block in folder.blocks())
    prompts = {"folder": folder.path, "entries": len(entries(folder)), "size_bytes": size, "limit_bytes": folder.limit}
    disk = _disk(settings.placement.disk, not no_measure, report, terminal)
    packed = _packed(not no_measure, report, terminal)
    if json:
        terminal.write(json_line(type="doctor", **asdict(report), disk=disk, prompts=prompts, packed=packed))
        return
    rows = list(_rows(report, settings.origins))
    if disk is not None:
        rate = "" if disk["read_gb_s"] is None else f", read at {disk['read_gb_s']:.1f} GB/s"
        rows.append(("disk", f"{_gib(disk['free_bytes'])} free{rate}, {disk['folder']}"))
    if packed is not None:
        kept = "" if packed["saved"] else "; not saved, as others compute meanwhile"
        where = f"{counted(packed['threads'], 'thread')} at {packed['level']}"
        rows.append(("packed", f"a token attends to --kv packed {packed['ratio']:.2f} times as fast, {where}{kept}"))
    used = f"{_gib(size)} of {_gib(folder.limit)}, {folder.path}"
    rows.append(("prompts", f"{counted(prompts['entries'], 'cached prompt')}, {used}"))
    indent, columns = max(len(name) for name, _ in rows) + 2, terminal.table_width
    lines = [f"{name:<{indent}}{text}" for name, text in rows]
    if columns is not None:
        lines = [part for line in lines for part in hanging(line, indent, columns)]
    terminal.write("".join(f"{line}\n" for line in lines))


def _disk(folder: str | None, measure: bool, report: Report, terminal: Terminal) -> dict[str, Any] | None:
    """Return the facts about the disk of a folder; a measured rate, in GB/s, is saved for plans. Raises SettingsError.

    The rate is None if it was not measured.
    """
    if folder is None:
        return None
    free, rate = free_on_disk(Path(folder)), None
    if measure:
        measured = load_or_measure(report.device.used == "cuda", terminal)
        measured = measured and measure_disk(folder, measured, terminal)
        rate = measured and measured.host.disk_gb_s
    return {"folder": Path(folder), "free_bytes": free, "read_gb_s": rate}


def _packed(measure: bool, report: Report, terminal: Terminal) -> dict[str, Any] | None:
    """Return what packed keys and values gain in this host's memory, and whether that is saved for --kv auto."""
    if not measure or report.kernel.level is None:
        return None
    gain, saved = measure_packing(report.kernel.level, report.device.used == "cuda", terminal)
    return None if gain is None else {**asdict(gain), "saved": saved}


def _rows(report: Report, origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each line; continuation lines have no name."""

    def asked(name: str, value: str) -> str:
        return f"(asked for: {value}, by {origins[name]})" if name in origins else f"(asked for: {value})"

    versions, device, kernel = report.versions, report.device, report.kernel
    processor, memory = report.processor, report.memory
    others = f"Python {versions.python}, torch {versions.torch}, transformers {versions.transformers}"
    yield "triforce", f"{versions.triforce} ({others})"
    yield "device", f"{device.used or f'none: {device.reason}'} {asked('device', device.asked)}"
    for number, gpu in enumerate(device.gpus):
        link = "" if gpu.link_gb_s is None else f", link {gpu.link_gb_s:.1f} GB/s"
        yield f"GPU {number}", f"{gpu.name}, {_gib(gpu.memory_bytes)}, {_gib(gpu.free_bytes)} free{link}"
    yield "processor", processor.name
    physical = "" if processor.cores is None else f"{processor.cores} physical, "
    threads = counted(processor.threads, "thread")
    yield "cores", f"{physical}{processor.logical_cores or '?'} logical, {threads} for torch"
    rate = "" if memory.read_gb_s is None else f", read at {memory.read_gb_s:.1f} GB/s"
    yield "memory", f"{_gib(memory.total_bytes)}, {_gib(memory.free_bytes)} free{rate}"
    if len(memory.nodes.numbers) > 1:
        how = "interleaved" if memory.nodes.is_interleaved else f"not interleaved, as {memory.nodes.reason}"
        yield "nodes", f"{len(memory.nodes.numbers)} with memory; weights and KV cache are {how}"
    yield "kernel", f"{kernel.level or f'none: {kernel.reason}'} {asked('kernel', kernel.asked)}"
    if kernel.hint:
        yield "", f"hint: {kernel.hint}"
    yield "levels", ", ".join(kernel.levels) or "none"
    yield "OpenMP", "yes" if versions.openmp else "no: torch was built without it"
    yield "families", ", ".join(report.families.native)
    yield "", f"and, with torch for some operations of their layers: {', '.join(report.families.mixed)}"
    yield "drafts", "; ".join(f"{draft} for {vocabulary}" for vocabulary, draft in report.draft_models.items())
    models = report.cache.models
    size = _gib(sum(model.size_bytes for model in models))
    yield "models", f"{counted(len(models), 'model')}, {size}, {report.cache.folder / 'models'}"
    yield from (("", f"{model.name}, {_gib(model.size_bytes)}") for model in models)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
