"""What every command needs from outside itself: the terminal, the cache folder, the flags that were really given."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from offload.errors import SettingsError
from offload.hardware.calibration import default_folder

from ..output.terminal import Terminal
from .settings import option_names


@dataclass(frozen=True, slots=True)
class Context:
    """Made once by the app's callback, and carried to the commands in typer's context."""

    terminal: Terminal
    home: Path | None


def cache_home(environ: os._Environ[str]) -> Path | None:
    """TRIFORCE_HOME, or None for the platform's cache folder."""
    return _folder(environ, "TRIFORCE_HOME")


def config_home(environ: os._Environ[str]) -> Path:
    """TRIFORCE_CONFIG, or the platform's folder for settings: where what was measured is kept."""
    return _folder(environ, "TRIFORCE_CONFIG") or default_folder()


def _folder(environ: os._Environ[str], name: str) -> Path | None:
    value = environ.get(name)
    try:
        return Path(value).expanduser().absolute() if value else None
    except RuntimeError as error:
        raise SettingsError(f"{name} is {value}: {error}", "set it to a folder") from error


def given(ctx: typer.Context) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings that a flag or the environment gave, and which of the two it was."""
    values = {k: v for k, v in ctx.params.items() if k in option_names() and v not in (None, [], ())}
    if "stop" in values:
        values["stop"] = tuple(values["stop"])
    origins = {}
    for name in values:
        source = ctx.get_parameter_source(name)
        origins[name] = "environment" if source is not None and source.name == "ENVIRONMENT" else "flag"
    return values, origins
