"""`triforce profile`: which profiles there are, and what one resolves to."""

from __future__ import annotations

import json as json_lib
from dataclasses import asdict
from typing import Annotated

import typer
import yaml

from offload import profile as profiles

from ..options import _complete_profile
from ..settings import gpu_names


def profile(
    ctx: typer.Context,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            help="A profile's name, a part of it such as 4090, or a YAML file.",
            show_default="by the hardware found",
            autocompletion=_complete_profile,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The profile as JSON, nothing else.")] = False,
) -> None:
    """List the hardware profiles, and show one as `generate --profile` would use it.

    [bold]Examples[/bold]

      triforce profile

      triforce profile --gpu 4090

      triforce profile --gpu my-machine.yaml --json
    """
    terminal = ctx.obj.terminal
    chosen = profiles.load(gpu) if gpu else profiles.matching(gpu_names())
    if json:
        terminal.write(json_lib.dumps(asdict(chosen) if chosen else None) + "\n")
        return
    names = profiles.available()
    width = max(map(len, names))
    for name in names:
        mark = "*" if chosen is not None and chosen.name == name else " "
        terminal.write(f"{mark} {name:<{width}}  {profiles.load(name).description}\n")
    if chosen is None:
        terminal.note("no profile describes this GPU; generate runs on it with the default settings")
        return
    terminal.write("\n" + yaml.safe_dump(asdict(chosen), sort_keys=False, allow_unicode=True))
