"""`triforce bench`: compares the methods of decoding on one prompt, or over lists of settings and prompts."""

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from offload.errors import PromptError, SettingsError
from offload.loading.hub.registry import resolve as resolve_model
from offload.settings.config import check_part
from offload.short_repr import short_repr

from ..bench import options as bench_options
from ..bench.axes import CONTEXT, Values, points, varied
from ..bench.compared import IN_BATCHES, name_of, parse_methods, parse_modes
from ..bench.ladder import TEMPERATURES, with_outputs
from ..bench.options import LAST, NEEDLES, NEW_TOKENS, STDOUT, check_kind, is_grid
from ..bench.peers import parse_peers
from ..bench.plot import check_plot
from ..distributed.rank import broadcast
from ..input.dataset import asked as ask
from ..input.dataset import check_dataset, read_dataset
from ..input.documents import check_files, read_documents, read_prompt
from ..options import declarations as options
from ..options.command_request import Request, given_arguments, start_or_join_ranks, warn_unused
from ..options.constraint_options import constraint_of_flags
from ..options.distinct_files import check_distinct, named_files
from ..options.mistakes import warn_of_file
from ..options.settings import given_options, resolve
from ..output.output_files import check_file
from ..output.progress import ProgressDisplay


@options.accepts(bench_options.SETTINGS)
def bench(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="Text, placed after files and stdin; - is stdin.", show_default=False)
    ] = None,
    prompt_file: options.PromptFiles = None,
    methods: bench_options.Methods = None,
    batch: bench_options.Batch = None,
    context: bench_options.Context = None,
    repeats: bench_options.Repeats = 3,
    json: bench_options.JsonObject = False,
    plot: bench_options.Plot = None,
    excerpts: bench_options.Excerpts = None,
    each_file: bench_options.EachFile = False,
    data: bench_options.Data = None,
    points: bench_options.Points = None,
    csv: bench_options.Csv = None,
    quality: bench_options.Quality = False,
    modes: bench_options.Modes = None,
    last: bench_options.Last = None,
    needles: bench_options.Needles = None,
    ladder: bench_options.Ladder = None,
    page: bench_options.Page = None,
    peers: bench_options.Peers = None,
) -> int:
    """Compare the methods of decoding on one prompt and this machine.

    The prompt is continued without the chat template, and past end-of-sequence tokens: every method generates the same
    number of tokens. The prompt is read once, and that time is part of every TTFT. Speedup is relative to ar. Memory is
    an estimate of the KV caches and the draft model, without the model itself.

    Options that show N,... take lists: all combinations run, on each prompt, and a table for each measure has a column
    for each value of what varies. With --points FILE, finished runs are kept: the same command goes on after them.

    With --batch, so many sequences from different places of the text are decoded together: ar and auto, or the
    --methods. Their rate is that of all, while all of them decode. Alone it compares them with one after the other;
    with lists of other settings it is one more list.

    With --quality, the modes that change the answer are compared with the exact one instead: the perplexity of the
    text's last tokens, agreement with exact greedy decoding, and a needle test. A mode is exact,
    streaming-llm, h2o, kv=q8, quantize=q4 to quantize=q8, or several joined by +; or
    recompute, which runs the last --budget tokens anew for each token, or dense, which attends to all of a text beyond
    the model's context. Such a text has no exact run: modes that all run there are measured without it.

    With --ladder, all methods run at these lengths of the text, for a summary, a quotation and a question, at
    temperatures 0 and 0.8, and each answer is compared with plain decoding's; --page FILE.html draws it. --peers runs
    other programs beside: transformers, llama.cpp (llama.cpp=FILE.gguf), or URLs of OpenAI endpoints up to /v1.

    [bold]Examples[/bold]

      triforce bench --prompt-file book.txt --context 4096

      triforce bench -f book.txt --temperature 0 --methods lookup,triforce --new 200

      triforce bench -f book.txt --repeats 5 --json > bench.json

      triforce bench -f book.txt --methods retrieval,retrieval:self

      triforce bench -f book.txt --methods retrieval,retrieval:middle=h2o,retrieval:middle=streaming

      triforce bench -f book.txt --draft Qwen/Qwen3-0.6B --plot bench.png

      triforce bench -f book.txt --context 2K,8K --temperature 0,0.6,1 --methods triforce --points runs.jsonl

      triforce bench -f book.txt --context 4K --prompts 5 --budget 256,1024 --csv grid.csv --plot grid.png

      triforce bench --data pg19/ --prompts 5 --context 8K --methods retrieval

      triforce bench -f book.txt --context 2K --batch 1,4,8 --repeats 1

      triforce bench -f book.txt --context 1K,2K --batch 1,4 --methods retrieval --csv - > grid.csv

      triforce bench -f book.txt --context 4096 --quality --modes h2o,quantize=q8

      triforce bench -f book.txt --ladder 4K,8K,16K,32K --points ladder.jsonl --page ladder.html

      triforce bench -f book.txt --ladder 4K,8K --peers transformers,http://127.0.0.1:8080/v1
    """
    check_kind(ctx)
    terminal, as_grid, quiet = ctx.obj.terminal, is_grid(ctx), bool(ctx.params["quiet"])
    ctx.params["constraint"] = constraint_of_flags(ctx.params)
    flags, origins, axes = _flags(ctx)
    check_files(prompt_file or [])
    warn_of_file(ctx, prompt)
    if data is not None:
        check_dataset(data)
    names = parse_methods(methods) if methods is not None else None
    others = parse_peers(peers) if peers is not None else ()
    compared = parse_modes(modes) if modes is not None else None
    sizes = _sizes(batch) if batch is not None else None
    if sizes is not None and names is None:
        names = IN_BATCHES
    _check_outputs(plot, csv, None if as_grid else sizes, json)
    inputs = [*(("--prompt-file", each) for each in prompt_file or []), *named_files(ctx)]
    tables = [("--csv", None if csv == STDOUT else csv), ("--plot", plot), ("--page", page)]
    check_distinct(inputs, [("--points", points), *tables])
    if page is not None:
        if page.suffix.lower() not in (".html", ".htm"):
            raise SettingsError(f"--page writes HTML, and {page} has another suffix", "name it ladder.html")
        check_file(page, "--page", "ladder.html")
    settings = resolve(flags, origins, ctx.params["profile"])
    if as_grid and "seed" not in settings.values:  # drawn at random, no run could be found again
        settings = replace(settings, generation=replace(settings.generation, seed=0))
    resolve_model(settings.engine.model)
    if not quality:
        warn_unused(settings, [name_of(each) for each in names or ["auto"]], terminal)
    rest: dict[str, Any] = {name: bool(ctx.params[name]) for name in ("dry_run", "extend_context")}
    request = Request(settings, ctx.obj.home, ctx.info_name, **rest, arguments=given_arguments(ctx))
    request, code = start_or_join_ranks(request, terminal)
    if code is not None:
        return code
    group = request.group
    texts, endings = broadcast(group, lambda: _texts(ctx, prompt, prompt_file or [], each_file, data))
    texts = [(name, text) for name, text in texts]
    if ladder is not None:
        texts, endings = with_outputs(texts)

    with closing(ProgressDisplay(terminal, shown=not quiet)) as display:
        display.loading("starting")
        from ..bench.benchmark import BenchOutput, BenchRequest  # from here on torch is needed
        from ..bench.measure import run_bench
        from ..bench.quality import run_quality
        from ..bench.quality_modes import QualityRequest
        from ..bench.report import BATCHES, BENCH, GRID, LADDER

        output = BenchOutput(json, quiet, plot, csv, page)
        if quality:
            count = NEEDLES if needles is None else needles
            scored = QualityRequest(request, texts[0][1], compared, context, last or LAST, count)
            return run_quality(scored, terminal, output, display)
        lengths = context if ladder is None else ladder
        contexts = None if lengths is None else tuple(_list(lengths))
        kind = LADDER if ladder is not None else GRID if as_grid else BENCH if sizes is None else BATCHES
        batches = tuple(dict.fromkeys(sizes or [1]))
        batches = tuple(sorted({1, *batches})) if kind == BATCHES else batches
        more = {"points": points, "batches": batches, "endings": endings, "kind": kind, "peers": others}
        counts = excerpts or (1 if data is None else len(texts)), repeats
        asked = BenchRequest(request, texts, names, axes, contexts, *counts, is_dataset=data is not None, **more)
        return run_bench(asked, terminal, output, display)


def _flags(ctx: typer.Context) -> tuple[dict[str, Any], dict[str, str], dict[str, Values]]:
    """Return the settings that were given, with the first value of each list, their origins, and the lists.

    Raises SettingsError for a combination of values that cannot be.
    """
    flags, origins = given_options(ctx)
    flags.setdefault("max_new_tokens", NEW_TOKENS)
    # --methods takes its place, also where a profile names one
    flags["method"] = "ar" if ctx.params["quality"] else "auto"
    if ctx.params["ladder"] is not None:
        flags = {"temperature": TEMPERATURES, "seed": 0} | flags  # a seed: so that draws can be compared
    axes = varied(flags)
    for point in points({CONTEXT: _list(ctx.params["context"])} | axes):
        check_part({name: value for name, value in (flags | point).items() if name != CONTEXT})
    return flags | {name: next(iter(values)) for name, values in axes.items()}, origins, axes


def _list(value: Any) -> Sequence[Any]:
    return tuple(value) if isinstance(value, Values) else (value,)


def _check_outputs(plot: Path | None, csv: Path | None, sizes: list[int] | None, json: bool) -> None:
    """Raise SettingsError for files that could not be written, and for two outputs on stdout."""
    if plot is not None and sizes is not None:
        raise SettingsError("--plot draws methods, not batches", "give a list too, such as --context 2K,8K")
    if plot is not None:
        check_plot(plot)
    if csv == STDOUT and json:
        raise SettingsError("--csv - and --json both write to standard output", "give --csv a file, or leave one out")
    if csv not in (None, STDOUT):
        check_file(csv, "--csv", "grid.csv")


def _texts(
    ctx: typer.Context, prompt: str | None, files: Sequence[Path | str], each_file: bool, data: str | None
) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return the names and texts of the prompts (one, each file's, or a data set's), and what stands behind some.

    Raises PromptError, FetchError.
    """
    terminal = ctx.obj.terminal
    if data is not None:
        if prompt is not None or files:
            raise PromptError("--data takes its prompts from a data set alone", "leave the other prompts out")
        found = read_dataset(data, terminal.warn)
        return [(each.name, each.text) for each in found], {each.name: ask(each.question) for each in found}
    if not each_file:
        return [("prompt", read_prompt(prompt, files, terminal.stdin, terminal.warn).text)], {}
    if prompt is not None or not files:
        raise PromptError("--each-file takes its prompts from --prompt-file alone", "give each with -f FILE")
    found = read_documents(files, terminal.stdin, terminal.warn)
    return [(Path(document.name).name, document.text) for document in found], {}


def _sizes(text: str) -> list[int]:
    """Return the sizes of --batch. Raises SettingsError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,3}", part) and int(part) for part in parts):
        message = f"--batch is {short_repr(text)}, which lists no numbers of sequences from 1 to 999"
        raise SettingsError(message, "write it like 8, or 1,2,4,8")
    return list(map(int, parts))
