"""The user's config.yaml, whose defaults are above the profile's, and the environment variables, which are above it.

The resolved settings as text, each with its origin, as users write them, for `-v`."""

import os
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from offload.errors import SettingsError
from offload.hardware.profile_file import is_path, plain_option, read
from offload.hardware.schema import OPTION_NAMES, InvalidValue, check_options, refuse_unknown
from offload.short_repr import short_repr, short_text
from offload.units import GIB

from ..output.tables import Column, table
from .declarations import THINK
from .settings import config_home

FILE = "config.yaml"
COMMANDS = ("generate", "summarize", "chat", "serve", "bench", "profile", "doctor")  # those that read it
_SETTINGS = [name for name in OPTION_NAMES if name != "stop"]
NAMES = ["profile", *_SETTINGS, "think"]


def defaults(environ: os._Environ[str]) -> dict[str, dict[str, Any]]:
    """Return the file's values by command and parameter, as typer takes a map of defaults; empty without a file.

    Raises SettingsError with the file and the key.
    """
    path = config_home(environ) / FILE
    return dict.fromkeys(COMMANDS, _parameters(path)) if path.exists() else {}


def _parameters(path: Path) -> dict[str, Any]:
    values = read(path, str(path)) or {}
    if not isinstance(values, dict):
        raise SettingsError(
            f"{path} is {short_repr(values)}, not keys and values", "write lines such as temperature: 0"
        )
    found: dict[str, Any] = {}
    try:
        refuse_unknown(values, NAMES, (), "docs/options.md lists all")
        given = {name: value for name, value in values.items() if value is not None}  # null is not given
        options = {name: plain_option(value, (name,)) for name, value in given.items() if name in _SETTINGS}
        check_options(options, _SETTINGS, ())
        found |= {name: value if isinstance(value, bool) else str(value) for name, value in options.items()}
        if "think" in given:
            found["think"] = _think(given["think"])
        if "profile" in given:
            found["profile"] = _profile(given["profile"], path)
    except InvalidValue as error:
        raise SettingsError(f"{path}: {error.message}", error.hint) from error
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


PREFIX = "TRIFORCE_"
_OTHERS = ("THINK", "PROFILE", "COLOR", "HOME", "CONFIG", "DEBUG", "API_KEY")
_INTERNAL = ("EMULATE", "RANK_LAUNCHER", "RANK_FOLDER")  # of tests, and between the ranks of one run
VARIABLES = {f"{PREFIX}{name.upper()}" for name in OPTION_NAMES if name != "stop"}
VARIABLES |= {PREFIX + name for name in (*_OTHERS, *_INTERNAL)}


def unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable with the program's prefix that nothing reads, with the closest one."""
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in VARIABLES and not name.startswith(f"{PREFIX}TEST_"):
            meant = "".join(f"; did you mean {each}?" for each in get_close_matches(name, VARIABLES, 1, 0.8))
            yield f"the environment variable {name} is not known, and has no effect{meant}"


SIZES = ("memory", "host_memory", "disk_limit", "cache_limit")
_ABSENT = {
    **dict.fromkeys(("gamma1", "gamma2", "rebuild_every"), "adaptive"),
    **dict.fromkeys(("memory", "host_memory", "disk_limit"), "what is free"),
    "resident_layers": "as many as fit",
    "host_share": "balanced",
    "budget": "by the length",
    "cache": "long prompts",
    "tensor_parallel": "the profile's",
}


def settings_lines(settings: Iterable[tuple[str, Any, str]], width: int) -> list[str]:
    """Return a line for each setting: its name, value and origin, in `width` columns."""
    rows = [(name.replace("_", "-"), value_text(name, value), origin) for name, value, origin in settings]
    columns = (Column("setting"), Column("value", least=8), Column("from", dropped=1))
    return table(columns, rows, width).plain.splitlines()


def value_text(name: str, value: Any) -> str:
    """Return a setting's value as its option takes it: `128K`, `0.3`, `24GB`; a word for what is left open."""
    if value is None or value == ():
        return _ABSENT.get(name, "none")
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
