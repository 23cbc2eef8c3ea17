"""Lossy modes and offloading: the flags that ask for them, what excludes what, and what is said of a lossy run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offload.errors import SettingsError
from offload.settings.config import Placement
from offload.settings.kv_formats import LOSSY_KV
from offload.settings.method_sizes import forgets, forgetting_capacity
from offload.settings.methods import APPROXIMATIONS
from offload.units import counted

from .settings import Settings


def lossy_modes(settings: Settings) -> tuple[str, ...]:
    """Return the flags that change the answer, such as `--kv q8`; none for an exact run."""
    found = {"--approximate": settings.speculation.approximate, "--kv": quantized_kv(settings)}
    return tuple(f"{flag} {mode}" for flag, mode in found.items() if mode is not None)


def quantized_kv(settings: Settings) -> str | None:
    """Return the format to which keys and values are quantised, or None."""
    return settings.engine.kv if settings.engine.kv in LOSSY_KV else None


def is_cacheable(settings: Settings) -> bool:
    """Return whether prompts go to the prompt cache: a cache that forgets has no keys and values of all tokens."""
    return not forgets(settings.speculation)


def refuse_inexact(settings: Settings, params: Mapping[str, Any]) -> None:
    """Raise SettingsError for flags that need an exact answer, or all keys and values, where there are none."""
    modes = lossy_modes(settings)
    if not modes:
        return
    mode = " and ".join(modes)
    if params.get("verify"):
        raise SettingsError(
            f"--verify compares with exact decoding, and {mode} changes the answer",
            "leave one of the two out",
        )
    if len(modes) > 1 and not forgets(settings.speculation):
        raise SettingsError(f"{mode} cannot be used together", "leave one of the two out")
    if params["dry_run"] and settings.speculation.approximate is not None:
        raise SettingsError(f"--dry-run plans exact decoding, not {mode}", "leave one of the two out")
    if not is_cacheable(settings) and settings.caching.cache and settings.origins.get("cache") == "flag":
        raise SettingsError(f"--cache keeps no prompts of {mode}", "leave --cache out")
    _refuse_offloading(settings, mode)


def _refuse_offloading(settings: Settings, mode: str) -> None:
    """Raise SettingsError for flags that offload keys and values which an approximate cache keeps on the device."""
    where = settings.placement
    if settings.speculation.approximate is None:
        return
    for flag in (*dividing_flags(where), *_given({"link": where.link_gb_s, "disk": where.disk})):
        raise SettingsError(
            f"{flag} offloads keys and values, and those of {mode} stay on the device", "leave one of the two out"
        )


def dividing_flags(where: Placement) -> list[str]:
    """Return the flags that divide keys and values between a device and the host."""
    offload = where.offload if where.offload not in ("auto", "none") else None
    return _given({"offload": offload, "resident-layers": where.resident_layers, "host-share": where.host_share})


def expert_flags(where: Placement) -> list[str]:
    """Return the flags that ask for experts in host memory, beside a device."""
    experts = where.experts if where.experts in ("host", "stream") else None
    return _given({"experts": experts, "expert-layers": where.expert_layers})


def _given(options: Mapping[str, Any]) -> list[str]:
    return [f"--{name} {value}" for name, value in options.items() if value is not None]


def approximation_warnings(settings: Settings) -> Iterator[str]:
    """Yield what a lossy run has to say before its text."""
    speculation = settings.speculation
    mode = speculation.approximate
    if kv := quantized_kv(settings):
        yield f"--kv {kv} changes the answer: the model attends to rounded keys and values"
    if mode is None:
        return
    if forgets(speculation):
        how = f"the model attends to {counted(forgetting_capacity(speculation), 'token')} at most, and forgets others"
    else:
        how = f"each step attends to about {counted(speculation.kept_tokens, 'token')} that it selects"
    yield f"--approximate {mode} changes the answer: {how}"
    if "window" in settings.values and "window" not in APPROXIMATIONS[mode].reads:
        yield f"--window is not used by {mode}: its window is what --budget leaves beside the sink"
