"""The request of a command line: settings and flags, before a model is opened. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from offload.errors import ModelNotFound, SettingsError
from offload.loading.hub.registry import draft_error
from offload.loading.hub.registry import resolve as resolve_model
from offload.settings.config import DRAFTS, Sampling, check_part
from offload.settings.constraint import QUOTE, Constraint
from offload.settings.method_sizes import has_draft_model
from offload.settings.methods import CHOSEN, LOOKUP, METHODS, MODEL

from ..distributed.launch import launch, ranks_to_start
from ..distributed.rank import join_group
from ..output.terminal import Terminal
from .checks import check_combinations, refuse_inexact, refuse_unverifiable
from .constraint_options import constraint_of_flags
from .declarations import AUTO
from .mistakes import WORDS
from .settings import Settings, given_options, resolve

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
        parts: the names of the files that a document was joined of, and where each begins in it.
        words: the words typed behind the command's name, to repeat them in hints and below a plan.
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
        """Return the request with the constraint that quotes the document, if there is one. Raises SettingsError."""
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
    `show_thinking`: a reasoning model's thoughts are on stdout, before its answer.
    """

    json: bool
    quiet: bool
    verbose: int
    show_thinking: bool = False


def parse_output_options(ctx: typer.Context) -> OutputOptions:
    """Return --json, --quiet, --verbose and --show-thinking."""
    json, quiet, thinking = (bool(ctx.params.get(name)) for name in ("json", "quiet", "show_thinking"))
    return OutputOptions(json, quiet, ctx.params.get("verbose") or 0, thinking)


def typed_words(ctx: typer.Context) -> tuple[str, ...]:
    """Return the words of the command line behind the command's name, but for --dry-run and --json."""
    words = ctx.meta.get(WORDS, ())
    end = words.index("--") if "--" in words else len(words)
    return (*(word for word in words[:end] if word not in ("--dry-run", "--json")), *words[end:])


def warn_unused(settings: Settings, methods: Iterable[str], terminal: Terminal) -> None:
    """Warn if the draft or the middle level that were asked for are used by none of the methods."""
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
    check_combinations(ctx.params)
    ctx.params["constraint"] = constraint_of_flags(ctx.params)  # once: a file may be a pipe
    given = given_options(ctx)[0]
    check_part(given)
    if "model" in given:
        resolve_model(given["model"])


def parse_request(ctx: typer.Context) -> Request:
    """Return the request in a command's options, the profile and the defaults. Raises SettingsError, ModelNotFound."""
    params = ctx.params
    settings = resolve(*given_options(ctx), params["profile"])
    _check_models(settings)
    if params.get("verify"):
        unknown = Sampling(temperature=0)  # the model's own
        refuse_unverifiable(settings, settings.sampling(unknown))
    refuse_inexact(settings, params)
    warn_unused(settings, [settings.speculation.method], ctx.obj.terminal)
    names = ("system", "raw", "think", "verify", "dry_run", "quote", "extend_context", "truncate")
    given = {name: params[name] for name in names if params.get(name) is not None}
    return Request(settings, ctx.obj.home, ctx.info_name or "", **given, words=typed_words(ctx))


def _check_models(settings: Settings) -> None:
    """Raise ModelNotFound for a name that cannot be a model's: torch is not imported for it."""
    resolve_model(settings.engine.model)
    source = settings.speculation.draft_source
    if source is not None and has_draft_model(settings.speculation):
        try:
            resolve_model(source)
        except ModelNotFound as error:
            raise draft_error(error) from error


def start_or_join_ranks(request: Request, terminal: Terminal, cluster: str | None = None) -> tuple[Request, int | None]:
    """Start the ranks that the request needs, or join them; none for a Ray `cluster`, whose workers are not ranks.

    Returns the request of this process, alone or as one of several ranks, and None; where this process has started
    the ranks, their exit code. Raises SettingsError, RankMissing.
    """
    if cluster is not None:
        if request.settings.parallel.tensor_parallel not in (None, 1):
            message = "--ray gives each worker one GPU, and --tensor-parallel asks for several"
            raise SettingsError(message, "leave one out")
        return request, None
    if not request.dry_run and (count := ranks_to_start(request.settings)):
        return request, launch(count, request.settings, request.home, terminal)
    group, settings = join_group(request.settings)
    return replace(request, settings=settings, group=group), None
