"""flag > environment > profile > the model's own > default, resolved once into frozen dataclasses."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from offload.config import (
    GROUPS,
    Caching,
    EngineConfig,
    GenerationConfig,
    Parallel,
    Placement,
    Sampling,
    Speculation,
    check_part,
)
from offload.errors import SettingsError
from offload.hardware import profiles
from offload.hardware.profiles import Profile
from offload.units import GIB

NO_PROFILE = "none"  # what is taken for a GPU that no profile describes: it runs, with the default settings


def option_names() -> set[str]:
    """Every setting that a flag, an environment variable or a profile may give."""
    return {field.name for group in GROUPS for field in fields(group)}


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for, wherever it was asked.

    `values` holds what a flag, the environment or the profile gave; the model's own sampling defaults fill the rest.
    `origins` says which of the three, for --verbose.
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

    def sampling(self, model_default: Sampling) -> Sampling:
        """The model's own sampling, corrected by what was chosen."""
        return replace(model_default, **_subset(Sampling, self.values))

    def memory_limit(self, device_type: str) -> int | None:
        """Bytes of the device that the profile and --memory grant; None leaves it to what is free."""
        gpu = self.profile.gpu
        gib = self.profile.host.memory_gib if device_type == "cpu" else gpu and gpu.memory_gib
        granted = (None if gib is None else int(gib * GIB), self.placement.memory)
        return min((size for size in granted if size is not None), default=None)

    def described(self, sampling: Sampling) -> dict[str, Any]:
        """Every resolved setting by name, for --json and --verbose."""
        known = asdict(self.engine) | asdict(self.generation) | asdict(self.speculation) | asdict(sampling)
        return (
            {"profile": self.profile.name}
            | known
            | asdict(self.placement)
            | asdict(self.caching)
            | asdict(self.parallel)
        )


def _subset(group: type, values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(group) if field.name in values}


def resolve(flags: Mapping[str, Any], origins: Mapping[str, str], profile: str | None) -> Settings:
    """Settings from flags (those given, the environment's included), a profile's name or file, and the defaults.

    Without a profile the one for the hardware found is taken. A seed is drawn here if none was given, so that it can
    be reported. Raises SettingsError.
    """
    check_part(flags)
    if profile and profile.lower() != profiles.AUTO:
        return resolve_with(flags, origins, profiles.load(profile))
    return resolve_with(flags, origins, _profile_of_this_machine(), chosen_by_name=False)


def resolve_with(
    flags: Mapping[str, Any], origins: Mapping[str, str], chosen: Profile, chosen_by_name: bool = True
) -> Settings:
    """The same with a profile at hand; one that was `chosen_by_name` also says which device to use."""
    device = {"device": chosen.device} if chosen_by_name else {}
    values = device | dict(chosen.options) | dict(flags)
    generation = GenerationConfig(**_subset(GenerationConfig, values))
    if generation.seed is None:
        generation = replace(generation, seed=secrets.randbits(32))
    named = dict.fromkeys(device | dict(chosen.options), f"profile {chosen.name}")
    engine = EngineConfig(**_subset(EngineConfig, values))
    speculation = Speculation(**_subset(Speculation, values))
    placement = Placement(**_subset(Placement, values))
    caching, parallel = Caching(**_subset(Caching, values)), Parallel(**_subset(Parallel, values))
    origins = named | dict(origins)
    return Settings(engine, generation, speculation, placement, caching, parallel, chosen, values, origins)


def _profile_of_this_machine() -> Profile:
    found = profiles.matching(gpu_names())
    return found if found is not None else replace(profiles.load("cpu"), name=NO_PROFILE, device="cuda", options={})


def gpu_names() -> list[str]:
    """The CUDA GPUs that torch sees."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def refuse_broken_text(name: str, texts: Sequence[str]) -> None:
    """Raises SettingsError for bytes that are no text: they arrive as lone surrogates."""
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
        raise SettingsError(f"{name} is not valid UTF-8", "give it in the encoding of the terminal")


def refuse_both(flags: Mapping[str, Any], first: str, second: str, why: str) -> None:
    """Raises SettingsError when two flags that contradict each other are both given."""
    if flags.get(first) and flags.get(second):
        names = [f"--{name.replace('_', '-')}" for name in (first, second)]
        raise SettingsError(f"{names[0]} and {names[1]} contradict each other", why)


def refuse_unverifiable(sampling: Sampling) -> None:
    """Raises SettingsError where the output cannot be compared with plain greedy decoding."""
    if not sampling.greedy:
        raise SettingsError(
            f"--verify compares with greedy decoding, and the temperature is {sampling.temperature}",
            "use --temperature 0",
        )
