"""The user's config.yaml, whose defaults are above the profile's, and the environment variables, which are above it.

Also the resolved settings as text, for `-v`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from offload.errors import SettingsError
from offload.hardware.profile_file import is_path, read
from offload.hardware.schema import OPTION_NAMES, refuse_unknown
from offload.settings.config import check_part
from offload.settings.parse import SIZES, parse_setting
from offload.short_repr import short_repr, short_text
from offload.units import size_text

from .settings import config_home

FILE = "config.yaml"
COMMANDS = ("generate", "summarize", "chat", "serve", "bench", "profile", "doctor")  # those that read it
_SETTINGS = [name for name in OPTION_NAMES if name != "stop"]
PREFIX = "TRIFORCE_"
_OTHERS = ("THINK", "PROFILE", "COLOR", "HOME", "CONFIG", "DEBUG", "API_KEY", "SERVER")
_INTERNAL = ("EMULATE", "RANK_LAUNCHER", "RANK_FOLDER")  # of tests, and between the ranks of one run
VARIABLES = {PREFIX + name for name in (*map(str.upper, _SETTINGS), *_OTHERS, *_INTERNAL)}


def defaults(environ: os._Environ[str]) -> dict[str, dict[str, Any]]:
    """Return the file's values by command and parameter, as typer takes a map of defaults; empty without a file.

    Raises SettingsError with the file and the key.
    """
    path = config_home(environ) / FILE
    if not path.exists():
        return {}
    values = read(path, str(path)) or {}
    if not isinstance(values, dict):
        raise SettingsError(f"{path} is {short_repr(values)}, not keys and values", "write lines such as top_k: 40")
    values = {name: value for name, value in values.items() if value is not None}
    given = {name: value if isinstance(value, bool) else str(value) for name, value in values.items()}
    try:
        refuse_unknown(values, ["profile", *_SETTINGS, "think"], (), "docs/options.md lists all")
        check_part({name: parse_setting(name, text) for name, text in given.items() if name in _SETTINGS})
    except SettingsError as error:
        raise SettingsError(f"{path}: {error.message}", error.hint) from error
    if isinstance(think := given.get("think"), bool):
        given["think"] = "on" if think else "off"  # YAML takes these words for true and false
    if is_path(profile := str(given.get("profile", ""))):
        given["profile"] = str(path.parent / Path(profile).expanduser())
    return dict.fromkeys(COMMANDS, given)


def unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable with the program's prefix that nothing reads, with the closest one."""
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in VARIABLES and not name.startswith(f"{PREFIX}TEST_"):
            meant = "".join(f"; did you mean {close}?" for close in get_close_matches(name, VARIABLES, 1, 0.8))
            yield f"the environment variable {name} is not known, and has no effect{meant}"


def settings_lines(settings: Iterable[tuple[str, Any, str]]) -> list[str]:
    """Return a line for each setting: its name, value and origin."""
    return [f"{name.replace('_', '-')}: {_value_text(name, value)} ({origin})" for name, value, origin in settings]


def _value_text(name: str, value: Any) -> str:
    if value is None or value == ():
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "constraint":
        return f"{value['kind']} {short_text(value['text'] or '')}".rstrip()
    if name in SIZES:
        return size_text(value)
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else str(value)
