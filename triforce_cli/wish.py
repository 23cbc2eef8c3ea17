"""What a command line asks of every prompt that it generates from. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from offload.config import Sampling, check_part

from .context import given
from .settings import Settings, refuse_both, refuse_broken_text, refuse_unverifiable, resolve


@dataclass(frozen=True, slots=True)
class Wish:
    """`raw` bypasses the chat template; `verify` compares with plain decoding; `dry_run` tells the plan and loads
    nothing; `extend_context` stretches the model's context where it is too short."""

    settings: Settings
    system: str | None
    raw: bool
    home: Path | None
    verify: bool = False
    dry_run: bool = False
    extend_context: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """How it is to be told."""

    json: bool
    quiet: bool
    verbose: bool


def check_flags(ctx: typer.Context) -> None:
    """Raises SettingsError for flags that could not be right whatever prompt and profile are found."""
    params: Mapping[str, Any] = ctx.params
    refuse_both(params, "raw", "system", "--raw uses no chat template, so there is no place for a system message")
    refuse_both(params, "quiet", "verbose", "choose one")
    for name, texts in (("--system", [params["system"] or ""]), ("--stop", params["stop"] or [])):
        refuse_broken_text(name, texts)
    check_part(given(ctx)[0])


def wish_of(ctx: typer.Context) -> Wish:
    """The options of `options.GENERATION`, with the profile and the defaults. Raises SettingsError."""
    params = ctx.params
    settings = resolve(*given(ctx), params["profile"])
    if params["verify"]:
        refuse_unverifiable(settings.sampling(Sampling(temperature=0)))  # as far as it was chosen here
    return Wish(
        settings,
        params["system"],
        bool(params["raw"]),
        ctx.obj.home,
        bool(params["verify"]),
        bool(params["dry_run"]),
        bool(params["extend_context"]),
    )


def output_of(ctx: typer.Context) -> Output:
    """--json, --quiet and --verbose."""
    return Output(*(bool(ctx.params[name]) for name in ("json", "quiet", "verbose")))
