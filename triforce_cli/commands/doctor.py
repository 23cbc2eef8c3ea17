"""`triforce doctor`: describes this machine and this installation, and whether the native kernel can be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from offload.prompt_cache.entries import entries
from offload.settings.config import check_part
from offload.units import GIB, counted

from ..options import declarations as options
from ..options.mode_checks import free_on_disk
from ..options.settings import given_options, resolve
from ..output.stdout_formats import json_line
from ..output.tables import hanging
from ..run.measured_rates import load_or_measure, measure_disk
from ..run.processor import processor_name
from ..run.prompt_cache import prompt_folder

_NO_KERNEL = "install a C compiler such as gcc, then install triforce again; until then torch serves, more slowly"


@options.accepts(options.chosen("profile device kernel threads disk"))
def doctor(
    ctx: typer.Context,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Do not measure memory.")] = False,
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
    from offload.api.diagnosis import examine

    terminal, home = ctx.obj.terminal, ctx.obj.home
    facts = examine(settings.engine, home, measure=not no_measure)
    facts["processor"]["name"] = processor_name()
    if (folder := settings.placement.disk) is not None:
        measured = None if no_measure else load_or_measure(facts["device"]["used"] == "cuda", terminal)
        measured = measured and measure_disk(folder, measured, terminal)
        rate = measured and measured.host.disk_gb_s
        facts["disk"] = {"folder": folder, "free_bytes": free_on_disk(Path(folder)), "read_gb_s": rate}
    prompts = prompt_folder(home, settings.caching.cache_limit)
    size = sum(block.size for block in prompts.blocks())
    facts["prompts"] = {"folder": prompts.path, "entries": len(entries(prompts)), "size_bytes": size}
    if json:
        terminal.write(json_line(type="doctor", **facts))
        return
    lines = [f"{name:<11}{text}" for name, text in _rows(facts, settings.origins)]
    if (columns := terminal.table_width) is not None:
        lines = [part for line in lines for part in hanging(line, 11, columns)]
    terminal.write("".join(f"{line}\n" for line in lines))


def _rows(facts: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each line; a line that continues another has no name."""
    versions, processor, memory, kernel = (facts[name] for name in ("versions", "processor", "memory", "kernel"))
    yield "triforce", ", ".join(f"{name} {versions[name]}" for name in ("triforce", "torch", "transformers", "python"))
    yield "device", _asked("device", facts["device"]["used"], facts["device"], origins)
    for number, gpu in enumerate(facts["device"]["gpus"]):
        free = f"{_gib(gpu['memory_bytes'])}, {_gib(gpu['free_bytes'])} free"
        yield f"GPU {number}", f"{gpu['name']}, {free}{_rate(', link', gpu['link_gb_s'])}"
    yield "processor", processor["name"]
    cores = f"{processor['cores'] or '?'} physical, {processor['logical_cores'] or '?'} logical"
    yield "cores", f"{cores}, {counted(processor['threads'], 'thread')} for torch"
    free = f"{_gib(memory['total_bytes'])}, {_gib(memory['free_bytes'])} free"
    yield "memory", f"{free}{_rate(', read at', memory['read_gb_s'])}"
    yield "kernel", _asked("kernel", kernel["level"], kernel, origins)
    if not kernel["levels"]:
        yield "", f"hint: {_NO_KERNEL}"
    yield "levels", ", ".join(kernel["levels"]) or "none"
    yield "families", ", ".join(facts["families"])
    models = facts["cache"]["models"]
    yield "models", f"{counted(len(models), 'model')}, {facts['cache']['folder'] / 'models'}"
    yield from (("", f"{name}, {_gib(size)}") for name, size in models.items())
    if disk := facts.get("disk"):
        yield "disk", f"{_gib(disk['free_bytes'])} free{_rate(', read at', disk['read_gb_s'])}, {disk['folder']}"
    prompts = facts["prompts"]
    kept = counted(prompts["entries"], "cached prompt")
    yield "prompts", f"{kept}, {_gib(prompts['size_bytes'])}, {prompts['folder']}"


def _asked(name: str, used: str | None, found: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    by = f", by {origins[name]}" if name in origins else ""
    state = used or f"none: {found['reason']}"
    return f"{state} (asked for: {found['asked']}{by})"


def _rate(label: str, rate: float | None) -> str:
    return "" if rate is None else f"{label} {rate:.1f} GB/s"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
