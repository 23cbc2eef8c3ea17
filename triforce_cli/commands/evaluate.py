"""`triforce evaluate`: tasks on long texts, by modes that change the answer, by endpoints and by exact decoding."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.errors import SettingsError
from offload.evaluation.tasks import TASKS

from ..bench.axes import Values, parse_context
from ..bench.options import STDOUT
from ..evaluate.request import DEFAULT_MODES, EvaluateRequest, parse_depths, parse_evaluated, parse_tasks
from ..input.documents import check_files, read_documents
from ..options import declarations as options
from ..options.command_request import Request
from ..options.distinct_files import check_distinct, named_files
from ..options.settings import given_options, resolve
from ..output.output_files import check_file, write_file
from ..output.progress import ProgressDisplay
from ..output.stdout_formats import json_line
from ..output.terminal import Terminal
from ..signals import DONE, INTERRUPTED

if TYPE_CHECKING:
    from ..evaluate.report import Evaluation

_LENGTHS = options.described("Tokens of each text: 8000, 16K.", "4K")
_NAMES = "model sink window budget chunk rebuild_every extend_context profile device dtype kernel threads prefill_chunk"
_SETTINGS = options.chosen(f"{_NAMES} quiet {options.PLACEMENT}")


@options.accepts(_SETTINGS)
def evaluate(
    ctx: typer.Context,
    tasks: Annotated[
        str | None,
        options.option(
            "--tasks", metavar="LIST", help=options.described("Tasks, with commas.", "all"), among=list(TASKS)
        ),
    ] = None,
    modes: Annotated[
        str | None,
        options.option(
            "--modes",
            metavar="LIST",
            help=options.described("Modes and URLs, with commas.", "exact and the --approximate ones"),
        ),
    ] = None,
    context: Annotated[Any, options.option("--context", metavar="N,...", help=_LENGTHS, parser=parse_context)] = "4K",
    depths: Annotated[
        Any,
        options.option(
            "--depths",
            metavar="N|LIST",
            help=options.described("How many, or which: 10%,90%.", "5"),
            parser=parse_depths,
        ),
    ] = "5",
    seeds: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Items of each task, length, depth.")] = 1,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in the chat template.")] = False,
    prompt_file: options.PromptFiles = None,
    points: Annotated[
        Path | None, options.option("--points", metavar="FILE", help="Keep finished answers; resume from them.")
    ] = None,
    csv: Annotated[Path | None, options.option("--csv", metavar="FILE", help="Write a table of all answers.")] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON lines: each answer, then the scores.")] = False,
) -> int:
    """Score what is found in long texts: needles, chains, counts, questions, turns and quotations.

    The tasks are made here, after RULER and MRCR, and scored by the text of the answers. Each mode gets the same items,
    of each length (--context) and depth. A mode is exact, streaming-llm, h2o, retrieval, kv=q8, kv=q4, kv=fp8,
    quantize=q4 to quantize=q8, several of these joined by +, map-reduce, map-reduce=2K for parts of 2K tokens, or the
    URL of an OpenAI endpoint. Things are hidden in --prompt-file, or in sentences that are made here.

    [bold]Examples[/bold]

      triforce evaluate --context 2K,4K --tasks single,multikey,quotation

      triforce evaluate -f book.txt --context 8K --modes streaming-llm,retrieval --seeds 4 --points runs.jsonl

      triforce evaluate --modes kv=q8,kv=q4,quantize=q4 --csv scores.csv

      triforce evaluate --modes http://127.0.0.1:8000/v1 --chat --json > scores.jsonl
    """
    terminal, quiet = ctx.obj.terminal, bool(ctx.params["quiet"])
    flags, origins = given_options(ctx)
    if prompt_file:
        check_files(prompt_file)
    inputs = [*(("--prompt-file", each) for each in prompt_file or []), *named_files(ctx)]
    check_distinct(inputs, [("--points", points), ("--csv", None if csv == STDOUT else csv)])
    if csv == STDOUT and json:
        raise SettingsError("--csv - and --json both write to standard output", "give --csv a file, or leave one out")
    if csv not in (None, STDOUT):
        check_file(csv, "--csv", "scores.csv")
    names = ",".join(TASKS) if tasks is None else tasks, ",".join(DEFAULT_MODES) if modes is None else modes
    chosen = parse_tasks(names[0]), parse_evaluated(names[1])
    settings = resolve({**flags, "method": "ar"}, origins, ctx.params["profile"])
    request = Request(settings, ctx.obj.home, ctx.info_name, extend_context=bool(ctx.params["extend_context"]))
    found = read_documents(prompt_file, terminal.stdin, terminal.warn) if prompt_file else []
    text = "\n\n".join(each.text for each in found) if found else None
    lengths = tuple(context) if isinstance(context, Values) else (context,)
    asked = EvaluateRequest(request, *chosen, lengths, depths, seeds, text, modes is not None, chat, points)
    with closing(ProgressDisplay(terminal, shown=not quiet)) as display:
        display.loading("starting")
        from ..evaluate.run import run_evaluation

        def emit(record: Any) -> None:
            if json:
                terminal.write(json_line(**record))

        evaluation = run_evaluation(asked, terminal, quiet, display, emit)
    for error in evaluation.errors[1:]:
        terminal.warn(str(error))
    if evaluation.records or not evaluation.errors:
        _report(evaluation, terminal, csv, json)
    if evaluation.errors:
        raise evaluation.errors[0]
    return INTERRUPTED if evaluation.interrupted else DONE


def _report(evaluation: "Evaluation", terminal: Terminal, csv: Path | None, json: bool) -> None:
    """Write the table of answers, and print the scores."""
    from ..evaluate.report import csv_text
    from ..evaluate.report_text import evaluation_text

    try:
        if csv not in (None, STDOUT):
            write_file(csv, csv_text(evaluation))
    finally:  # on a full disk, too
        if json:
            terminal.write(json_line(**evaluation.as_json()))
        elif csv == STDOUT:
            terminal.write(csv_text(evaluation))
        else:
            terminal.print(evaluation_text(evaluation, terminal.table_width))
