"""`triforce bench`: compares the methods of decoding on one prompt."""

from __future__ import annotations

from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from offload.config import Sampling, check_part
from offload.errors import SettingsError
from offload.loading.registry import resolve as resolve_model
from offload.units import parse_tokens

from ..bench.methods import DEFAULT, name_of, parse
from ..bench.plot import check_plot
from ..bench.quality.modes import CHANGED
from ..bench.quality.modes import DEFAULT as MODES_DEFAULT
from ..bench.quality.modes import parse as parse_modes
from ..distributed.rank import broadcast
from ..input.documents import check_files
from ..input.prompt import read_prompt
from ..options import declarations as options
from ..options import groups as option_groups
from ..options.request import Request, given_arguments, start_or_join_ranks, warn_unused_draft, warn_unused_middle
from ..options.settings import given_options, resolve
from ..output.progress import ProgressDisplay

NEW_TOKENS = 128
LAST, NEEDLES = 256, 5  # of --quality
QUALITY = "Quality"
_QUALITY = ("modes", "last", "needles")
_SPEED = ("methods", "repeats", "draft", "tree", "tree_sampling", "rebuild_every", "gamma1", "gamma2", "seed")
_SPEED += (*(field.name for field in fields(Sampling)), *CHANGED)


@option_groups.accepts(option_groups.TREES | option_groups.PLACEMENT | option_groups.PARALLEL)
def bench(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="Text, placed after files and stdin; - is stdin.", show_default=False)
    ] = None,
    prompt_file: options.PromptFiles = None,
    methods: Annotated[
        str | None,
        typer.Option(metavar="LIST", help=options.described("Methods, with commas.", DEFAULT), show_default=False),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help=options.described("Use the first tokens: 8000, 16K.", "all"),
            show_default=False,
            parser=parse_tokens,
            metavar="N",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--new",
            "--max-new-tokens",
            "-n",
            metavar="N",
            help=options.described("Tokens to generate.", str(NEW_TOKENS)),
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Runs of each method.")] = 3,
    model: options.Model = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    dry_multiplier: options.DryMultiplier = None,
    dry_base: options.DryBase = None,
    dry_allowed_length: options.DryAllowedLength = None,
    dry_range: options.DryRange = None,
    no_repeat_ngram: options.NoRepeatNgram = None,
    coupled: options.Coupled = None,
    seed: options.Seed = None,
    draft: options.Draft = None,
    middle: options.Middle = None,
    sink: options.Sink = None,
    window: options.Window = None,
    budget: options.Budget = None,
    chunk: options.Chunk = None,
    rebuild_every: options.RebuildEvery = None,
    gamma1: options.Gamma1 = None,
    gamma2: options.Gamma2 = None,
    extend_context: options.ExtendContext = False,
    profile: options.ProfileName = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    kernel: options.Kernel = None,
    quantize: options.Quantize = None,
    threads: options.Threads = None,
    prefill_chunk: options.PrefillChunk = None,
    dry_run: options.DryRun = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object, with all samples.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw tokens per second: a.png.", metavar="FILE"),
    ] = None,
    quiet: options.Quiet = False,
    quality: Annotated[
        bool,
        typer.Option("--quality", help="Compare the answers of lossy modes.", rich_help_panel=QUALITY),
    ] = False,
    modes: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help=options.described("Modes, with commas.", MODES_DEFAULT),
            show_default=False,
            rich_help_panel=QUALITY,
        ),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=options.described("Tokens to score.", str(LAST)),
            parser=parse_tokens,
            show_default=False,
            rich_help_panel=QUALITY,
        ),
    ] = None,
    needles: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=100,
            metavar="N",
            help=options.described("Texts with a needle to find.", str(NEEDLES)),
            show_default=False,
            rich_help_panel=QUALITY,
        ),
    ] = None,
) -> int:
    """Compare the methods of decoding on one prompt and this machine.

    The prompt is continued without the chat template, and past end-of-sequence tokens: every method generates the same
    number of tokens. The prompt is read once, and that time is part of every TTFT. Speedup is relative to ar. Memory is
    an estimate of the KV caches and the draft model, without the model itself.

    With --quality, the modes that change the answer are compared with the exact one instead: the perplexity of the
    text's last tokens, agreement with exact greedy decoding, and a needle test. A mode is exact,
    streaming-llm, h2o, retrieval, quantize=q4 to quantize=q8, or several joined by +.

    [bold]Examples[/bold]

      triforce bench --prompt-file book.txt --context 4096

      triforce bench -f book.txt --temperature 0 --methods lookup,triforce --new 200

      triforce bench -f book.txt --repeats 5 --json > bench.json

      triforce bench -f book.txt --methods retrieval,retrieval:self

      triforce bench -f book.txt --methods retrieval,retrieval:middle=h2o,retrieval:middle=streaming

      triforce bench -f book.txt --draft Qwen/Qwen3-0.6B --plot bench.png

      triforce bench -f book.txt --context 4096 --quality --modes h2o,quantize=q8
    """
    _check_kind(ctx, quality)
    flags, origins = given_options(ctx)
    flags["max_new_tokens"] = NEW_TOKENS if max_new_tokens is None else max_new_tokens
    flags["method"] = "ar" if quality else "auto"  # --methods takes its place, also where a profile names one
    check_part(flags)
    check_files(prompt_file or [])
    names = parse(methods) if methods is not None else None
    compared = parse_modes(modes) if modes is not None else None
    if plot is not None:
        check_plot(plot)
    terminal = ctx.obj.terminal
    settings = resolve(flags, origins, profile)
    resolve_model(settings.engine.model)
    for warn in () if quality else (warn_unused_draft, warn_unused_middle):
        warn(settings, [name_of(each) for each in names or ["auto"]], terminal)
    rest = {"dry_run": dry_run, "extend_context": extend_context, "arguments": given_arguments(ctx)}
    request = Request(settings, ctx.obj.home, ctx.info_name, **rest)
    request, code = start_or_join_ranks(request, terminal)
    if code is not None:
        return code
    group = request.group
    text = broadcast(group, lambda: read_prompt(prompt, prompt_file or [], terminal.stdin, terminal.warn))

    with closing(ProgressDisplay(terminal, shown=not quiet)) as display:
        display.loading("starting")
        from ..bench.benchmark import BenchRequest  # from here on torch is needed
        from ..bench.run import BenchOutput, run_benchmark

        output = BenchOutput(json, quiet, plot if group is None or group.rank == 0 else None)
        if quality:
            from ..bench.quality.request import QualityRequest
            from ..bench.quality.run import run_quality

            asked = QualityRequest(
                request, text, compared, context, last or LAST, NEEDLES if needles is None else needles
            )
            return run_quality(asked, terminal, output, display)
        return run_benchmark(BenchRequest(request, text, names, context, repeats), terminal, output, display)


def _check_kind(ctx: typer.Context, quality: bool) -> None:
    """Raise SettingsError for a flag that only the other kind of benchmark reads."""
    unread, other = (_SPEED, "without") if quality else (_QUALITY, "with")
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name)
        if param.name in unread and source is not None and source.name == "COMMANDLINE":
            raise SettingsError(
                f"{param.opts[0]} has no effect {'with' if quality else 'without'} --quality",
                f"leave it out, or run the benchmark {other} --quality",
            )
