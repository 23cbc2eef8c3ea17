"""The user's config.yaml, whose defaults are above the profile's, and the environment variables, which are above it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from offload.errors import SettingsError
from offload.hardware.profile_file import Document, is_path, plain_option, read
from offload.hardware.schema import OPTION_NAMES, InvalidValue, check_options, refuse_unknown
from offload.settings.generation import COUPLED, FASTEST, parse_sampling
from offload.short_repr import short_repr

from .declarations import THINK
from .settings import config_home

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
        raise _with_place(error, document, "sampling") from error
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


def _with_place(error: SettingsError, document: Document, key: str) -> SettingsError:
    return document.error((key,), error.message, error.hint)


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
