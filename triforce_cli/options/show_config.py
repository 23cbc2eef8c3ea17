"""`--show-config`: the resolved settings as YAML that config.yaml takes, each with where its value came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import typer
import yaml

from offload.settings.config import Sampling
from offload.settings.generation import COUPLED, FASTEST

from ..output.settings_text import SIZES, size_text
from .config_file import FILE, OTHER_NAMES
from .declarations import AUTO
from .settings import Settings, origin_of

_UNSET = {"seed": "drawn for each run", "coupled": "by the seed", "device": "default"}


def show_config(ctx: typer.Context, settings: Settings) -> None:
    """Print the settings of a command to stdout, and end it."""
    variables = {param.name: param.envvar for param in ctx.command.params}
    lines = []
    for name, value, origin in _rows(ctx, settings):
        if origin == "environment":
            origin = f"environment variable {variables[name]}"
        lines.append((f"{OTHER_NAMES.get(name, name)}: {_scalar(name, value)}", origin.replace("config", FILE)))
    width = max(len(line) for line, _ in lines)
    ctx.obj.terminal.write("".join(f"{line:<{width}}  # {origin}\n" for line, origin in lines))
    raise typer.Exit


def _rows(ctx: typer.Context, settings: Settings) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, the value and the origin of each setting; a value of None is not given."""
    params = ctx.params
    named = params.get("profile")
    yield "profile", named, origin_of(ctx, "profile") if named else f"found: {settings.profile.name}"
    groups = (settings.engine, settings.generation, settings.speculation, Sampling(), settings.placement)
    for group in (*groups, settings.caching, settings.parallel):
        for name in (field.name for field in fields(group) if field.name != "stop"):
            if name in settings.values:
                yield name, settings.values[name], settings.origins.get(name, "default")
            elif name in _UNSET or isinstance(group, Sampling):
                yield name, None, _UNSET.get(name, "the model's, or the default")
            else:
                yield name, getattr(group, name), "default"
    if "think" in params:
        think = params["think"]
        yield "think", think or AUTO, origin_of(ctx, "think") if think else "default"


def _scalar(name: str, value: Any) -> str:
    if name == "coupled" and value is not None:
        value = COUPLED if value else FASTEST
    elif name in SIZES and value is not None:
        value = size_text(value)
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    return yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True).splitlines()[0]
