"""`triforce bench`: compares the methods of decoding on one prompt, or lossy modes with exact decoding."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Annotated, Any

import typer

from offload.errors import SettingsError
from offload.loading.hub.registry import resolve as resolve_model
from offload.settings.config import check_part
from offload.settings.parse import parse_setting
from offload.short_repr import short_repr
from offload.units import parse_tokens

from ..bench.methods import name_of, parse_methods, parse_modes
from ..distributed.rank import broadcast
from ..input.documents import files_in, read_prompt
from ..options import declarations as options
from ..options.mistakes import warn_of_file
from ..options.request import Request, start_or_join_ranks, typed_words, warn_unused
from ..options.settings import given_options, resolve
from ..output.progress import ProgressDisplay

NEW_TOKENS, REPEATS, LAST = 128, 3, 256
_OF_SPEED, _OF_QUALITY = ("methods", "max_new_tokens", "repeats"), ("modes", "last")
_ALL = "all that can run"


def _listed(name: str, parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of several values with commas, each once."""

    def parser(text: str) -> tuple[Any, ...]:
        try:
            return tuple(dict.fromkeys(parse(part.strip()) for part in str(text).split(",")))
        except (ValueError, SettingsError):
            hint = "give a number, or several with commas"
            raise SettingsError(f"--{name} is {short_repr(text)}", hint) from None

    parser.__name__ = name  # typer reads it
    return parser


_number = partial(options.option, metavar="N")
_CONTEXT = options.described("Use the first tokens: 8000, or 2K,8K.", "all")
_NEW = options.described("Tokens to generate.", str(NEW_TOKENS))
_list = partial(options.option, metavar="LIST")
_SETTINGS = options.chosen(
    "model quiet top_p top_k min_p repetition_penalty seed draft middle budget gamma2 tree extend_context "
    f"{options.PLACEMENT} kv dry_run profile device dtype kernel quantize threads tensor_parallel set"
)


@options.accepts(_SETTINGS)
def bench(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="Text, placed after files and stdin; - is stdin.", show_default=False)
    ] = None,
    prompt_file: options.PromptFiles = None,
    methods: Annotated[str | None, _list(help=options.described("Methods, with commas.", _ALL))] = None,
    context: Annotated[Any, _number(help=_CONTEXT, parser=_listed("context", parse_tokens), metavar="N,...")] = None,
    temperature: Annotated[
        Any,
        _number(
            help=options.described("One, or several with commas.", "model's"),
            parser=_listed("temperature", float),
            metavar="X,...",
        ),
    ] = None,
    max_new_tokens: Annotated[
        Any, _number("--new", "--max-new-tokens", "-n", help=_NEW, parser=partial(parse_setting, "max_new_tokens"))
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Runs of each method.")] = REPEATS,
    json: Annotated[bool, typer.Option("--json", help="One JSON object, with all runs.")] = False,
    quality: Annotated[bool, options.option("--quality", help="Compare lossy modes with exact decoding.")] = False,
    modes: Annotated[str | None, _list(help=options.described("Of --quality: modes, with commas.", _ALL))] = None,
    last: Annotated[
        Any, _number(help=options.described("Of --quality: tokens to score.", str(LAST)), parser=parse_tokens)
    ] = None,
) -> int:
    """Compare the methods of decoding on one prompt and this machine.

    The prompt is continued without the chat template, and past end-of-sequence tokens: every method generates the same
    number of tokens. Each context is read once, and that time is part of every TTFT. Speedup is relative to ar. MiB is
    an estimate of the KV caches and the draft model, without the model itself.

    --context and --temperature take lists: all methods run at each combination. In --methods a name may have settings
    for it alone: retrieval:budget=1024, triforce:draft=none:tree=16.

    With --quality, modes that change the answer are compared with the exact one instead, by the text's last tokens,
    each given the true ones before it: perplexity, KL divergence, and how often both find the same token likeliest.
    A mode is streaming-llm, h2o, kv=q8, or quantize=q4 to quantize=q8.

    [bold]Examples[/bold]

      triforce bench --prompt-file book.txt --context 4096

      triforce bench -f book.txt --context 2K,8K --temperature 0,0.6,1 --methods triforce,lookup

      triforce bench -f book.txt --repeats 5 --json > bench.json

      triforce bench -f book.txt --methods retrieval,retrieval:middle=streaming --draft Qwen/Qwen3-0.6B

      triforce bench -f book.txt --context 4096 --quality --modes h2o,quantize=q8
    """
    terminal, quiet = ctx.obj.terminal, bool(ctx.params["quiet"])
    _check_kind(ctx, quality)
    files = files_in(prompt_file or [], terminal.note)
    warn_of_file(ctx, prompt)
    names = None if methods is None else parse_methods(methods)
    compared = None if modes is None else parse_modes(modes)
    request, temperatures = _request(ctx, quality)
    if not quality:
        warn_unused(request.settings, [name_of(row) for row in names or ["auto"]], terminal)
    request, code = start_or_join_ranks(request, terminal)
    if code is not None:
        return code
    text = broadcast(request.group, lambda: read_prompt(prompt, files, terminal.stdin, terminal.warn).text)

    with closing(ProgressDisplay(terminal, shown=not quiet)) as display:
        display.loading("starting")
        from ..bench.measure import run_bench  # from here on torch is needed
        from ..bench.opened import BenchRequest
        from ..bench.quality import QualityRequest, run_quality

        contexts = context or ()
        if quality:
            scored = QualityRequest(request, text, compared, contexts, last or LAST)
            return run_quality(scored, terminal, json, quiet, display)
        asked = BenchRequest(request, text, names, contexts, temperatures, repeats)
        return run_bench(asked, terminal, json, quiet, display)


def _request(ctx: typer.Context, quality: bool) -> tuple[Request, tuple[float, ...]]:
    """Return the request, and the temperatures; empty for the model's own. Raises SettingsError, ModelNotFound."""
    flags, origins = given_options(ctx)
    flags.setdefault("max_new_tokens", NEW_TOKENS)
    flags["method"] = "ar" if quality else "auto"  # --methods takes its place, also where a profile names one
    temperatures = flags.pop("temperature", ())
    for temperature in temperatures:
        check_part(flags | {"temperature": temperature})
    settings = resolve(
        flags | ({"temperature": temperatures[0]} if temperatures else {}), origins, ctx.params["profile"]
    )
    resolve_model(settings.engine.model)
    switches: dict[str, Any] = {name: bool(ctx.params[name]) for name in ("dry_run", "extend_context")}
    words = typed_words(ctx)
    return Request(settings, ctx.obj.home, ctx.info_name or "", **switches, words=words), temperatures


def _check_kind(ctx: typer.Context, quality: bool) -> None:
    """Raise SettingsError for options that the kind of comparison does not read."""
    for name in _OF_SPEED if quality else _OF_QUALITY:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            way, other = ("with", "without") if quality else ("without", "with")
            option = next(param.opts[0] for param in ctx.command.params if param.name == name)
            raise SettingsError(f"{option} has no effect {way} --quality", f"leave it out, or run {other} --quality")
    if quality and (several := next((name for name in ("context", "temperature") if _count(ctx, name) > 1), None)):
        raise SettingsError(f"--{several} is a list, and --quality takes one", "give one of them")


def _count(ctx: typer.Context, name: str) -> int:
    return len(ctx.params[name] or ())
