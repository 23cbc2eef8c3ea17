"""Settings by precedence: flag > environment > config.yaml > profile > the model's own > default; resolved once."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import typer

from offload.errors import SettingsError
from offload.hardware import profiles
from offload.hardware.calibration import default_folder
from offload.hardware.driver import may_have_gpus
from offload.hardware.profiles import Profile
from offload.settings.config import (
    Caching,
    EngineConfig,
    GenerationConfig,
    Parallel,
    Placement,
    Sampling,
    Speculation,
    check_part,
)
from offload.settings.constraint import QUOTE
from offload.settings.methods import PLAIN
from offload.settings.parse import NAMES, parse_assignment, parse_setting
from offload.units import GIB

NO_PROFILE = "none"  # the name for a GPU without a profile: it runs with the default settings
_ORIGINS = {"ENVIRONMENT": "environment", "DEFAULT_MAP": "config"}  # by the source of a parameter; all others are flags


def given_options(ctx: typer.Context) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings that a flag, the environment or config.yaml gave, and for each which of them it was.

    Settings without an option come from --set, from their variable, or from config.yaml. Raises SettingsError.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name in (*NAMES, "constraint"):
        if name in ctx.params:
            value, origin = ctx.params[name], origin_of(ctx, name)
        elif "set" in ctx.params and name != "stop":
            value, origin = _given_without_option(ctx, name)
        else:
            continue  # a command that reads few settings
        if value not in (None, [], ()):
            values[name], origins[name] = value, origin
    for assignment in ctx.params.get("set") or []:
        name, value = parse_assignment(assignment)
        if origins.get(name) == "flag":
            raise SettingsError(f"--set {assignment} repeats the option of that name", "leave one of the two out")
        values[name], origins[name] = value, "flag"
    if "stop" in values:
        values["stop"] = tuple(values["stop"])
    return values, origins


def _given_without_option(ctx: typer.Context, name: str) -> tuple[Any, str]:
    """Return the value of a setting in the environment or in config.yaml, and which of them gave it."""
    variable = f"TRIFORCE_{name.upper()}"
    if not (text := os.environ.get(variable)):
        return parse_setting(name, (ctx.default_map or {}).get(name)), "config"
    try:
        return parse_setting(name, text), "environment"
    except SettingsError as error:
        hint = f"the value is that of the environment variable {variable}; {error.hint}"
        raise SettingsError(error.message, hint) from None


def origin_of(ctx: typer.Context, name: str) -> str:
    """Return what gave a parameter its value: flag, environment or config."""
    source = ctx.get_parameter_source(name)
    return _ORIGINS.get(source.name if source else "", "flag")


def cache_home(environ: os._Environ[str]) -> Path | None:
    """Return TRIFORCE_HOME, or None for the platform's cache folder. Raises SettingsError."""
    return _folder(environ, "TRIFORCE_HOME")


def config_home(environ: os._Environ[str]) -> Path:
    """Return the folder of saved measurements: TRIFORCE_CONFIG, or the platform's. Raises SettingsError."""
    return _folder(environ, "TRIFORCE_CONFIG") or default_folder()


def _folder(environ: os._Environ[str], name: str) -> Path | None:
    value = environ.get(name)
    try:
        return Path(value).expanduser().absolute() if value else None
    except RuntimeError as error:
        raise SettingsError(f"{name} is {value}: {error}", "set it to a folder") from error


@dataclass(frozen=True, slots=True)
class Settings:
    """The resolved settings of a command.

    `values` holds what a flag, the environment or the profile gave; the model's own sampling defaults fill the rest.
    `origins` names which of the three gave it, for --verbose.
    """

    engine: EngineConfig
    generation: GenerationConfig
    speculation: Speculation
    placement: Placement
    caching: Caching
    parallel: Parallel
    profile: Profile
    values: Mapping[str, Any]
    origins: Mapping[str, str]

    @property
    def coupled(self) -> bool:
        """Whether sampling is coupled: as given, else where a seed is given."""
        return self.values.get("coupled", "seed" in self.values)

    def sampling(self, model_default: Sampling) -> Sampling:
        """Return the model's own sampling, overridden by the given values; coupled if a seed is given."""
        return model_default.overridden(_subset(Sampling, self.values) | {"coupled": self.coupled})

    def overridden(self, options: Mapping[str, Any], draw_seed: Callable[[], int]) -> Settings:
        """Return the settings with `options`, by name as in `values`, that hold for one of many requests alone.

        Where neither the command nor the request gives a seed, `draw_seed` returns it: equal prompts have different
        answers. A seed of the request couples the draws, as --seed does.
        """
        values = dict(self.values) | dict(options)
        if "seed" in options and "coupled" not in options and "coupled" not in self.origins:
            values["coupled"] = True
        own = _subset(GenerationConfig, options)
        if "seed" not in values:
            own["seed"] = draw_seed()
        speculation = replace(self.speculation, **_subset(Speculation, options))
        return replace(self, values=values, generation=replace(self.generation, **own), speculation=speculation)

    def memory_limit(self, device_type: str) -> int | None:
        """Return the bytes of the device that the profile and --memory allow; None for no limit but free memory."""
        gpu = self.profile.gpu
        gib = self.profile.host.memory_gib if device_type == "cpu" else None if gpu is None else gpu.memory_gib
        granted = (None if gib is None else int(gib * GIB), self.placement.memory)
        return min((size for size in granted if size is not None), default=None)

    def described(self, sampling: Sampling) -> dict[str, Any]:
        """Return every resolved setting by name, for --json and --verbose."""
        groups = (self.engine, self.generation, self.speculation, sampling, self.placement, self.caching, self.parallel)
        described: dict[str, Any] = {"profile": self.profile.name}
        for group in groups:
            described |= asdict(group)
        if sampling.constraint is not None and sampling.constraint.kind == QUOTE:
            described["constraint"]["text"] = None  # the whole document
        return described


_GROUPS: dict[str, type] = {
    "engine": EngineConfig,
    "generation": GenerationConfig,
    "speculation": Speculation,
    "placement": Placement,
    "caching": Caching,
    "parallel": Parallel,
}


def _subset(group: type, values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(group) if field.name in values}


def resolve(flags: Mapping[str, Any], origins: Mapping[str, str], profile: str | None) -> Settings:
    """Return the settings from the given flags (the environment's too), a profile's name or file, and the defaults.

    Without a profile the one for the hardware found is taken. A seed is drawn here if none was given, so that it can
    be reported. Raises SettingsError.
    """
    check_part(flags)
    if profile and profile.lower() != profiles.AUTO:
        return resolve_with(flags, origins, profiles.load(profile))
    of_machine = profiles.matching(gpu_names())
    if of_machine is None:
        of_machine = replace(profiles.load("cpu"), name=NO_PROFILE, device="cuda", options={})
    return resolve_with(flags, origins, of_machine, chosen_by_name=False)


def resolve_with(
    flags: Mapping[str, Any], origins: Mapping[str, str], chosen: Profile, chosen_by_name: bool = True
) -> Settings:
    """Return the settings with a loaded profile; one that was `chosen_by_name` also sets the device."""
    of_profile = ({"device": chosen.device} if chosen_by_name else {}) | dict(chosen.options)
    values = of_profile | dict(flags)
    if "approximate" in flags and "method" not in flags:
        values["method"] = PLAIN  # the only one; a profile's is for exact decoding
    groups = {name: group(**_subset(group, values)) for name, group in _GROUPS.items()}
    if groups["generation"].seed is None:
        groups["generation"] = replace(groups["generation"], seed=secrets.randbits(32))
    origins = dict.fromkeys(of_profile, f"profile {chosen.name}") | dict(origins)
    return Settings(**groups, profile=chosen, values=values, origins=origins)


def gpu_names() -> list[str]:
    """Return the names of the CUDA GPUs that torch sees. Torch is imported only if there may be one."""
    if not may_have_gpus():
        return []
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
