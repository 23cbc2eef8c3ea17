"""The user's config.yaml, whose defaults are above the profile's, and the environment variables, which are above it.

The resolved settings as text, each with its origin: YAML for `--show-config`, as users write them for `-v`."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer
import yaml

from offload.errors import SettingsError
from offload.hardware.profile_file import is_path, plain_option, read
from offload.hardware.schema import OPTION_NAMES, InvalidValue, check_options, refuse_unknown
from offload.settings.config import Sampling
from offload.settings.generation import COUPLED, FASTEST, parse_sampling
from offload.short_repr import short_repr, short_text
from offload.units import GIB

from ..output.tables import Column, table
from .declarations import AUTO, THINK
from .settings import Settings, config_home, origin_of

FILE = "config.yaml"
COMMANDS = ("generate", "summarize", "chat", "serve", "bench", "profile", "doctor")  # those that read it
OTHER_NAMES = {"coupled": "sampling"}  # settings that are written as their option is called
_SETTINGS = [name for name in OPTION_NAMES if name not in ("stop", *OTHER_NAMES)]
NAMES = ["profile", *_SETTINGS, *OTHER_NAMES.values(), "think"]


def defaults(environ: os._Environ[str]) -> dict[str, dict[str, Any]]:
    """Return the file's values by command and parameter, as typer takes a map of defaults; empty without a file.

    Raises SettingsError with the file and the line.
    """
    path = config_home(environ) / FILE
    return dict.fromkeys(COMMANDS, _parameters(path)) if path.exists() else {}


def _parameters(path: Path) -> dict[str, Any]:
    document = read(path, str(path))
    values = {} if document.values is None else document.values
    if not isinstance(values, dict):
        raise SettingsError(
            f"{path} is {short_repr(values)}, not keys and values", "write lines such as temperature: 0"
        )
    found: dict[str, Any] = {}
    try:
        refuse_unknown(values, NAMES, (), "`triforce generate --show-config` lists all")
        given = {name: value for name, value in values.items() if value is not None}  # null is not given
        options = {name: plain_option(value, (name,)) for name, value in given.items() if name in _SETTINGS}
        check_options(options, _SETTINGS, ())
        found |= {name: value if isinstance(value, bool) else str(value) for name, value in options.items()}
        if "sampling" in given:
            found["coupled"] = COUPLED if parse_sampling(str(given["sampling"])) else FASTEST
        if "think" in given:
            found["think"] = _think(given["think"])
        if "profile" in given:
            found["profile"] = _profile(given["profile"], path)
    except InvalidValue as error:
        raise document.error(error.key, error.message, error.hint) from error
    except SettingsError as error:
        raise document.error(("sampling",), error.message, error.hint) from error
    return found


def _think(value: Any) -> str:
    text = {True: "on", False: "off"}.get(value, value)  # YAML's words for true and false
    if text not in THINK:
        raise InvalidValue(("think",), f"think is {short_repr(value)}", f"use one of: {', '.join(THINK)}")
    return text


def _profile(value: Any, path: Path) -> str:
    """Return the name of a profile, which may be a number (4090), or its file, relative to the folder of this one."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidValue(("profile",), f"profile is {short_repr(value)}, not text", "name a profile, or a YAML file")
    name = str(value)
    return str(path.parent / Path(name).expanduser()) if is_path(name) else name


def names_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the names that the file has for them."""
    return {OTHER_NAMES.get(name, name): value for name, value in parameters.items()}


PREFIX = "TRIFORCE_"
_WITHOUT = ("stop", "coupled")  # settings without a variable of their name
_OTHERS = ("SAMPLING", "THINK", "PROFILE", "COLOR", "HOME", "CONFIG", "DEBUG", "API_KEY")
_INTERNAL = ("EMULATE", "RANK_LAUNCHER", "RANK_FOLDER")  # of tests, and between the ranks of one run
VARIABLES = {f"{PREFIX}{name.upper()}" for name in OPTION_NAMES if name not in _WITHOUT}
VARIABLES |= {PREFIX + name for name in (*_OTHERS, *_INTERNAL)}


def unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable with the program's prefix that nothing reads, with the closest one."""
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in VARIABLES and not name.startswith(f"{PREFIX}TEST_"):
            meant = "".join(f"; did you mean {each}?" for each in get_close_matches(name, VARIABLES, 1, 0.8))
            yield f"the environment variable {name} is not known, and has no effect{meant}"


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
        for name in (field.name for field in fields(group) if field.name not in ("stop", "constraint")):
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
    if name == "constraint":
        return " ".join([value["kind"], *([] if value["text"] is None else [short_text(value["text"])])])
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
