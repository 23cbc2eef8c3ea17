"""`--approximate`: what it cannot be combined with, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offload.errors import SettingsError
from offload.levels import forgets, forgetting_capacity
from offload.methods import STREAMING_LLM
from offload.units import counted

from .settings import Settings


def refuse_inexact(settings: Settings, params: Mapping[str, Any]) -> None:
    """Raise SettingsError for flags that need an exact answer, or all keys and values, where there are none."""
    mode = settings.speculation.approximate
    if mode is None:
        return
    if params["verify"]:
        raise SettingsError(
            f"--verify compares with exact decoding, and --approximate {mode} changes the answer",
            "leave one of the two out",
        )
    if params["dry_run"]:
        raise SettingsError(
            f"--dry-run plans exact decoding, not --approximate {mode}",
            "leave one of the two out",
        )
    if settings.caching.cache and settings.origins.get("cache") == "flag":
        raise SettingsError(
            f"--cache keeps exact prompts, and --approximate {mode} computes others", "leave --cache out"
        )
    _refuse_offloading(settings, mode)


def _refuse_offloading(settings: Settings, mode: str) -> None:
    where = settings.placement
    asked = {
        "offload": where.offload if where.offload not in ("auto", "none") else None,
        "resident-layers": where.resident_layers,
        "host-share": where.host_share,
        "link": where.link_gb_s,
    }
    for name, value in asked.items():
        if value is not None:
            raise SettingsError(
                f"--{name} {value} offloads keys and values, and those of --approximate {mode} stay on the device",
                "leave one of the two out",
            )


def approximation_warnings(settings: Settings) -> Iterator[str]:
    """Yield what a lossy run has to say before its text."""
    speculation = settings.speculation
    mode = speculation.approximate
    if mode is None:
        return
    if forgets(speculation):
        how = f"the model attends to {counted(forgetting_capacity(speculation), 'token')} at most, and forgets others"
    else:
        how = f"each step attends to about {counted(speculation.budget, 'token')} that it selects"
    yield f"--approximate {mode} changes the answer: {how}"
    if mode == STREAMING_LLM and "window" in settings.values:
        yield "--window is not used by streaming-llm: its window is what --budget leaves beside the sink"
