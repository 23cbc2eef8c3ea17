"""The settings that `/set` changes: those of sampling and of generation, by the names of their options."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from offload.errors import SettingsError
from offload.hardware.schema import did_you_mean
from offload.settings.config import GenerationConfig, Sampling, check_part
from offload.settings.generation import parse_sampling

from ..options.config_file import value_text
from ..options.other_names import hint_for
from ..run.model_request import ModelRequest

_NAMES = {"sampling": "coupled"}  # options of another name than their setting's
_PARSERS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "float": (float, "a number"),
    "int": (int, "a whole number"),
    "int | None": (int, "a whole number"),
    "bool": (parse_sampling, "coupled or fastest"),
    "tuple[str, ...]": (lambda text: () if text == "none" else (text,), "a text, or none"),
}
_TYPES = {field.name: field.type for group in (Sampling, GenerationConfig) for field in fields(group)}
del _TYPES["constraint"]  # of one question, by other options
PARAMETERS = {  # the setting of each option
    **{name.replace("_", "-"): name for name in _TYPES if name not in _NAMES.values()},
    **_NAMES,
}


def parse_parameter(name: str, value: str) -> dict[str, Any]:
    """Return a setting by its name in `Settings.values`. Raises SettingsError."""
    setting = _setting(name)
    parse, wanted = _PARSERS[_TYPES[setting]]
    try:
        parsed = {setting: parse(value)}
    except ValueError:
        raise SettingsError(f"{name} is {value!r}", f"give {wanted}") from None
    check_part(parsed)
    return parsed


def described(opened: ModelRequest, name: str = "") -> list[str]:
    """Return a line with the value of a setting, or with no name a line for each. Raises SettingsError."""
    current = opened.settings.described(opened.sampling)
    chosen = PARAMETERS if not name else {each: found for each, found in PARAMETERS.items() if found == _setting(name)}
    width = max(map(len, chosen))
    return [f"{option:<{width}}  {value_text(setting, current[setting])}" for option, setting in chosen.items()]


def _option(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def _setting(name: str) -> str:
    option = _option(name)
    if option not in PARAMETERS and (hint := hint_for(option)):
        raise SettingsError(f"there is no setting {name}", f"on the command line: {hint}; /set lists the settings")
    if option not in PARAMETERS:
        raise SettingsError(f"there is no setting {name}", f"{did_you_mean(option, PARAMETERS)}/set lists them")
    return PARAMETERS[option]
