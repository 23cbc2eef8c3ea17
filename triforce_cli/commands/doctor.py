"""`triforce doctor`: describes this machine and this installation, and whether the native kernel can be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from offload.settings.config import check_part
from offload.units import counted, size_text

from ..options import declarations as options
from ..options.settings import given_options, resolve
from ..output.plan_text import facts_text
from ..output.stdout_formats import json_line
from ..run.processor import processor_name

_NO_KERNEL = "hint: install a C compiler such as gcc, then install triforce again; until then torch serves, more slowly"


@options.accepts(options.chosen("profile device kernel threads"))
def doctor(
    ctx: typer.Context, json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False
) -> None:
    """Describe this machine and this installation, and whether the native kernel can be used.

    Settings are resolved as `generate` resolves them. A missing kernel is not an error: torch is used instead.

    [bold]Examples[/bold]

      triforce doctor

      triforce doctor --kernel portable --json
    """
    flags, origins = given_options(ctx)
    check_part(flags)
    settings = resolve(flags, origins, ctx.params["profile"])
    from offload.api.diagnosis import examine

    terminal = ctx.obj.terminal
    facts = examine(settings.engine, ctx.obj.home)
    facts["processor"]["name"] = processor_name()
    if json:
        terminal.write(json_line(type="doctor", **facts))
    else:
        terminal.print(facts_text(list(_rows(facts, settings.origins)), terminal.table_width))


def _rows(facts: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each line; a line that continues another has no name."""
    versions, processor, memory, kernel = (facts[name] for name in ("versions", "processor", "memory", "kernel"))
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    yield "device", _asked("device", facts["device"]["used"], facts["device"], origins)
    for number, gpu in enumerate(facts["device"]["gpus"]):
        yield f"GPU {number}", f"{gpu['name']}, {size_text(gpu['memory_bytes'])}, {size_text(gpu['free_bytes'])} free"
    cores = f"{processor['cores'] or '?'} physical, {processor['logical_cores'] or '?'} logical cores"
    yield "processor", f"{processor['name']}, {cores}, {counted(processor['threads'], 'thread')} for torch"
    yield "memory", f"{size_text(memory['total_bytes'])}, {size_text(memory['free_bytes'])} free"
    yield "kernel", _asked("kernel", kernel["level"], kernel, origins)
    yield "", f"levels: {', '.join(kernel['levels'])}" if kernel["levels"] else _NO_KERNEL
    yield "families", ", ".join(facts["families"])
    yield "cache", str(facts["cache"]["folder"])


def _asked(name: str, used: str | None, facts: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    by = f", by {origins[name]}" if name in origins else ""
    return f"{used or 'none: ' + facts['reason']} (asked for: {facts['asked']}{by})"
