"""What a command line asks of every prompt that it generates from. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from offload.config import Sampling, check_part

from ..distributed.launch import launch, ranks_to_start
from ..distributed.rank import joined
from ..output.terminal import Terminal
from .context import given
from .settings import Settings, refuse_both, refuse_broken_text, refuse_unverifiable, resolve

if TYPE_CHECKING:
    from offload.parallel import Group


@dataclass(frozen=True, slots=True)
class Wish:
    """`raw` bypasses the chat template; `verify` compares with plain decoding; `dry_run` tells the plan and loads
    nothing; `extend_context` stretches the model's context where it is too short; `group` are the ranks that share the
    model, None where this process has all of it."""

    settings: Settings
    system: str | None
    raw: bool
    home: Path | None
    verify: bool = False
    dry_run: bool = False
    extend_context: bool = False
    group: Group | None = None


@dataclass(frozen=True, slots=True)
class Telling:
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
    """The options of `option_groups.GENERATION`, with the profile and the defaults. Raises SettingsError."""
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


def output_of(ctx: typer.Context) -> Telling:
    """--json, --quiet and --verbose."""
    return Telling(*(bool(ctx.params[name]) for name in ("json", "quiet", "verbose")))


def shared(wish: Wish, terminal: Terminal) -> tuple[Wish, int | None]:
    """The wish of this process as one of several ranks, or alone; where it has to start them, their exit code.

    Raises SettingsError, RankMissing.
    """
    if not wish.dry_run and (count := ranks_to_start(wish.settings)):
        return wish, launch(count, wish.settings, wish.home, terminal)
    group, settings = joined(wish.settings)
    return replace(wish, settings=settings, group=group), None
