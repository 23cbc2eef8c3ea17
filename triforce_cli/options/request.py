"""The request of a command line: settings and flags, before a model is opened. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from offload.errors import ModelNotFound, SettingsError
from offload.loading.hub.registry import draft_error
from offload.loading.hub.registry import resolve as resolve_model
from offload.settings.config import DRAFTS, Sampling, check_part
from offload.settings.constraint import QUOTE, Constraint
from offload.settings.method_sizes import has_draft_model
from offload.settings.methods import CHOSEN, LOOKUP, METHODS, MODEL
from offload.short_repr import short_repr

from ..distributed.launch import GRACE, launch, ranks_to_start
from ..distributed.rank import join_group
from ..input.excerpts import END, MIDDLE, PARTS, START
from ..output.terminal import Terminal
from .constraint_options import constraint_of_flags
from .declarations import AUTO, THINK
from .mistakes import WORDS
from .mode_checks import refuse_inexact
from .settings import Settings, given_options, refuse_both, refuse_broken_text, refuse_unverifiable, resolve

if TYPE_CHECKING:
    from offload.parallel import Group


@dataclass(frozen=True, slots=True)
class Request:
    """The settings and flags of a command, the same for each of its prompts.

    Args:
        home: triforce's cache folder; None for the platform's.
        command: the command's name, for the command line that ends a printed plan.
        system: a system message for the chat template; `raw` bypasses the template.
        think: one of THINK: whether a reasoning model is to think; "auto" is the chat template's default.
        verify: compare the output with plain decoding.
        dry_run: print the plan and load nothing.
        quote: whether the answer's quotations must be literal parts of the document.
        extend_context: extend the model's context where it is too short.
        truncate: the part of a document that is left out where the context is too short; None for none.
        group: the ranks that share the model; None where this process runs all of it.
        parts: the names of what a document was joined of, with where each begins in it.
        words: what was typed behind the command's name, to repeat it in hints and below a plan.
    """

    settings: Settings
    home: Path | None
    command: str
    system: str | None = None
    raw: bool = False
    think: str = AUTO
    verify: bool = False
    dry_run: bool = False
    quote: bool = False
    extend_context: bool = False
    truncate: str | None = None
    group: Group | None = None
    words: tuple[str, ...] = ()
    parts: Sequence[tuple[str, int]] = ()

    def about(self, documents: Sequence[str], parts: Sequence[tuple[str, int]] = ()) -> Request:
        """Return the request with what answers must match, if that depends on documents. Raises SettingsError."""
        if not self.quote:
            return self
        if len(documents) > 1:
            message = f"--quote says where the document has a quotation, and there are {len(documents)} documents"
            raise SettingsError(message, "give one of them at a time")
        values = dict(self.settings.values) | {"constraint": Constraint(QUOTE, documents[0])}
        return replace(self, settings=replace(self.settings, values=values), parts=parts)

    @property
    def is_first(self) -> bool:
        """Return whether this process has the user's streams and files: alone, or as rank 0."""
        return self.group is None or self.group.rank == 0


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The form of the output: JSON lines or text, without statistics, or with all of them and the settings.

    `verbose`: 1 shows the settings that are not defaults, 2 all.
    `show_thinking`: what a reasoning model thinks is on stdout, before its answer.
    """

    json: bool
    quiet: bool
    verbose: int
    show_thinking: bool = False


def typed_words(ctx: typer.Context) -> tuple[str, ...]:
    """Return the words of the command line behind the command's name, but for --dry-run and --json."""
    words = ctx.meta.get(WORDS, ())
    end = words.index("--") if "--" in words else len(words)
    return (*(word for word in words[:end] if word not in ("--dry-run", "--json")), *words[end:])


def warn_unused(settings: Settings, methods: Iterable[str], terminal: Terminal) -> None:
    """Warn if the draft, the middle level or the trees that were asked for are used by none of the methods."""
    methods, wanted = list(methods), settings.values.get("draft")
    drafters, has_middle = {METHODS[name].drafter for name in methods}, any(METHODS[name].middle for name in methods)
    is_wanted, is_used = wanted not in (None, *DRAFTS), drafters & {CHOSEN, MODEL}
    if is_wanted and not is_used and not settings.origins.get("draft", "").startswith("profile"):
        how = "drafts by lookup" if LOOKUP in drafters else "uses no drafter"
        terminal.warn(f"--draft {wanted} is not used: --method {', '.join(methods)} {how}")
    if settings.origins.get("middle") == "flag" and not has_middle:
        middle = settings.speculation.middle
        terminal.warn(f"--middle {middle} is not used: --method {', '.join(methods)} has no middle level")


def check_flags(ctx: typer.Context) -> None:
    """Raise SettingsError for flags that are wrong whatever prompt and profile are found."""
    params: Mapping[str, Any] = ctx.params
    refuse_both(params, "raw", "system", "--raw uses no chat template, which a system message needs")
    refuse_both(params, "quiet", "verbose", "choose one")
    check_truncate(params)
    _check_think(params)
    for name, texts in (("--system", [params.get("system") or ""]), ("--stop", params.get("stop") or [])):
        refuse_broken_text(name, texts)
    ctx.params["constraint"] = constraint_of_flags(params)  # once: a file may be a pipe
    given = given_options(ctx)[0]
    check_part(given)
    if "model" in given:
        resolve_model(given["model"])


def check_truncate(params: Mapping[str, Any]) -> None:
    """Raise SettingsError for a --truncate that names no part, or that goes with another way to read a long text."""
    dropped = params.get("truncate")
    if dropped not in (None, *PARTS):
        hint = f"name the part that is left out: {START} (transformers' left), {MIDDLE} or {END} (right)"
        raise SettingsError(f"--truncate {short_repr(dropped)} is not one of {', '.join(PARTS)}", hint)
    for other in ("extend_context", "map_reduce", "batch"):
        refuse_both(params, "truncate", other, "choose one of them for a text that exceeds the context")


def _check_think(params: Mapping[str, Any]) -> None:
    """Raise SettingsError for a --think that is no choice, and for --raw with an option about thinking."""
    think = params.get("think")
    if think not in (None, *THINK):
        raise SettingsError(f"--think {short_repr(think)} is not one of {', '.join(THINK)}", "use --think off")
    if params.get("raw") and think not in (None, AUTO):
        raise SettingsError("--raw uses no chat template, which --think needs", "leave one of the two out")
    if params.get("raw") and params.get("show_thinking"):
        raise SettingsError("--raw writes all text, and --show-thinking has no effect", "leave one of the two out")


def parse_request(ctx: typer.Context) -> Request:
    """Return the request in the options of `groups.GENERATION`, the profile and the defaults. Raises SettingsError."""
    params = ctx.params
    settings = resolve(*given_options(ctx), params["profile"])
    _check_models(settings)
    if params.get("verify"):
        refuse_unverifiable(
            settings, settings.sampling(Sampling(temperature=0))
        )  # the model's own sampling is not known yet
    refuse_inexact(settings, params)
    named = ("raw", "verify", "dry_run", "quote", "extend_context")
    warn_unused(settings, [settings.speculation.method], ctx.obj.terminal)
    more: dict[str, Any] = {name: bool(params.get(name)) for name in named} | {
        "think": params.get("think") or AUTO,
        "truncate": params.get("truncate"),
        "words": typed_words(ctx),
    }
    return Request(settings, ctx.obj.home, ctx.info_name, params.get("system"), **more)


def _check_models(settings: Settings) -> None:
    """Raise ModelNotFound for a name that cannot be a model's: torch is not imported for it."""
    resolve_model(settings.engine.model)
    source = settings.speculation.draft_source
    if source is not None and has_draft_model(settings.speculation):
        try:
            resolve_model(source)
        except ModelNotFound as error:
            raise draft_error(error) from error


def parse_output_options(ctx: typer.Context) -> OutputOptions:
    """Return --json, --quiet, --verbose and --show-thinking."""
    params = ctx.params
    json, quiet, show_thinking = (bool(params.get(name)) for name in ("json", "quiet", "show_thinking"))
    return OutputOptions(json, quiet, params.get("verbose") or 0, show_thinking)


def start_or_join_ranks(
    request: Request, terminal: Terminal, cluster: str | None = None, grace: float = GRACE
) -> tuple[Request, int | None]:
    """Start the ranks that the request needs, or join them; none for a Ray `cluster`, whose workers are not ranks.

    After a signal, ranks that are started here have `grace` seconds to end.
    Returns the request of this process, alone or as one of several ranks, and None; where this process has started
    the ranks, their exit code. Raises SettingsError, RankMissing.
    """
    if cluster is not None:
        if request.settings.parallel.tensor_parallel not in (None, 1):
            message = "--ray gives each worker one GPU, and --tensor-parallel asks for several"
            raise SettingsError(message, "leave one out")
        return request, None
    if not request.dry_run and (count := ranks_to_start(request.settings)):
        return request, launch(count, request.settings, request.home, terminal, grace)
    group, settings = join_group(request.settings)
    return replace(request, settings=settings, group=group), None
