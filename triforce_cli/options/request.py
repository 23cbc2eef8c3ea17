"""What a command line asks: settings and flags, before a model is opened. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from offload.config import Sampling, check_part
from offload.errors import ModelNotFound
from offload.levels import has_draft_model
from offload.loading.hub import check_name, draft_error

from ..distributed.launch import launch, ranks_to_start
from ..distributed.rank import join_group
from ..output.terminal import Terminal
from .settings import Settings, given_options, refuse_both, refuse_broken_text, refuse_unverifiable, resolve

if TYPE_CHECKING:
    from offload.parallel import Group


@dataclass(frozen=True, slots=True)
class Request:
    """What a command asks of every prompt that it generates from.

    Args:
        home: triforce's cache folder; None for the platform's.
        command: the command's name, for the command line that a plan ends with.
        system: a system message for the chat template; `raw` bypasses the template.
        verify: compare the output with plain decoding.
        dry_run: print the plan and load nothing.
        extend_context: stretch the model's context where it is too short.
        group: the ranks that share the model; None where this process has all of it.
    """

    settings: Settings
    home: Path | None
    command: str
    system: str | None = None
    raw: bool = False
    verify: bool = False
    dry_run: bool = False
    extend_context: bool = False
    group: Group | None = None


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The form of the output: JSON lines or text, without statistics, or with the resolved settings."""

    json: bool
    quiet: bool
    verbose: bool


def check_flags(ctx: typer.Context) -> None:
    """Raise SettingsError for flags that are wrong whatever prompt and profile are found."""
    params: Mapping[str, Any] = ctx.params
    refuse_both(params, "raw", "system", "--raw uses no chat template, so there is no place for a system message")
    refuse_both(params, "quiet", "verbose", "choose one")
    for name, texts in (("--system", [params["system"] or ""]), ("--stop", params["stop"] or [])):
        refuse_broken_text(name, texts)
    given = given_options(ctx)[0]
    check_part(given)
    if "model" in given:
        check_name(given["model"])


def parse_request(ctx: typer.Context) -> Request:
    """Return the request in the options of `groups.GENERATION`, the profile and the defaults. Raises SettingsError."""
    params = ctx.params
    settings = resolve(*given_options(ctx), params["profile"])
    _check_models(settings)
    if params["verify"]:
        refuse_unverifiable(settings.sampling(Sampling(temperature=0)))  # the model's own sampling is not known yet
    flags = {name: bool(params[name]) for name in ("raw", "verify", "dry_run", "extend_context")}
    return Request(settings, ctx.obj.home, ctx.info_name, params["system"], **flags)


def _check_models(settings: Settings) -> None:
    """Raise ModelNotFound for a name that cannot be a model's: torch is not imported for it."""
    check_name(settings.engine.model)
    if has_draft_model(settings.speculation):
        try:
            check_name(settings.speculation.draft_model)
        except ModelNotFound as error:
            raise draft_error(error) from error


def parse_output_options(ctx: typer.Context) -> OutputOptions:
    """Return --json, --quiet and --verbose."""
    return OutputOptions(*(bool(ctx.params[name]) for name in ("json", "quiet", "verbose")))


def start_or_join_ranks(request: Request, terminal: Terminal) -> tuple[Request, int | None]:
    """Start the ranks that the request needs, or join them.

    Returns the request of this process, alone or as one of several ranks, and None; where this process has started
    the ranks, their exit code. Raises SettingsError, RankMissing.
    """
    if not request.dry_run and (count := ranks_to_start(request.settings)):
        return request, launch(count, request.settings, request.home, terminal)
    group, settings = join_group(request.settings)
    return replace(request, settings=settings, group=group), None
