"""The resolved settings as text, each with its origin: YAML for `--show-config`, as users write them for `-v`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

import typer
import yaml

from offload.settings.config import Sampling
from offload.settings.generation import COUPLED, FASTEST
from offload.units import GIB

from ..output.tables import Column, table
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


SIZES = ("memory", "host_memory", "disk_limit", "cache_limit")
_ABSENT = {
    **dict.fromkeys(("gamma1", "gamma2", "rebuild_every"), "adaptive"),
    **dict.fromkeys(("memory", "host_memory", "disk_limit"), "what is free"),
    **dict.fromkeys(("resident_layers", "expert_layers"), "as many as fit"),
    "host_share": "balanced",
    "budget": "by the length",
    "cache": "long prompts",
    "tensor_parallel": "the profile's",
}


def settings_lines(settings: Iterable[tuple[str, Any, str]], width: int) -> list[str]:
    """Return a line for each setting: its name, value and origin, in `width` columns."""
    rows = [
        (OTHER_NAMES.get(name, name.replace("_", "-")), value_text(name, value), origin)
        for name, value, origin in settings
    ]
    columns = (Column("setting"), Column("value", least=8), Column("from", dropped=1))
    return table(columns, rows, width).plain.splitlines()


def value_text(name: str, value: Any) -> str:
    """Return a setting's value as its option takes it: `128K`, `0.3`, `24GB`; a word for what is left open."""
    if value is None or value == ():
        return _ABSENT.get(name, "none")
    if name == "coupled":
        return COUPLED if value else FASTEST
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "threads" and value == 0:
        return "all cores"
    if name in SIZES:
        return size_text(value)
    if name == "context" and value % 1024 == 0:
        return f"{value // 1024}K"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else str(value)


def size_text(size: int) -> str:
    """Return a size as it is usually given: `20GiB`, `24GB`, `1500MB`; bytes if it is not round."""
    for unit, name in ((GIB, "GiB"), (10**9, "GB"), (2**20, "MiB"), (10**6, "MB")):
        if size and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)
