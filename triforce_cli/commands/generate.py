"""`triforce generate`: generates text from a prompt, printed as it comes."""

from contextlib import ExitStack, closing
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Annotated, Any

import typer

from ..batch.items import read_lines
from ..batch.result_file import ResultFile
from ..distributed.rank import broadcast
from ..input.documents import PromptText, files_in, name_of, read_prompt
from ..options import declarations as options
from ..options.checks import check_distinct, check_output, named_files
from ..options.declarations import AUTO, parse_parallel
from ..options.mistakes import warn_of_file
from ..options.request import check_flags, parse_output_options, parse_request, start_or_join_ranks
from ..output.batch_display import BatchDisplay
from ..output.plan_text import print_plan
from ..output.renderers import renderer_for
from ..run.profile_plans import plan_unfetched
from ..run.remote import run_remote

_AT_A_TIME = options.described("Sequences at a time.", AUTO)


def _of_batch(*names: str, **more: Any) -> Any:
    return options.option(*names, rich_help_panel=options.BATCH, **more)


@options.accepts(options.READING)
def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="Text, placed after files and stdin; - is stdin.", show_default=False)
    ] = None,
    prompt_file: options.PromptFiles = None,
    batch: Annotated[
        str | None, _of_batch("--batch", metavar="FILE", help="Answer all prompts of a file of JSON lines.")
    ] = None,
    output: Annotated[
        str | None, options.option("--output", "-o", metavar="FILE", help="Write here; with --batch, resumable.")
    ] = None,
    parallel: Annotated[Any, _of_batch("--parallel", metavar="N", help=_AT_A_TIME, parser=parse_parallel)] = None,
    ray: Annotated[str | None, _of_batch("--ray", **options.CLUSTER)] = None,
    server: Annotated[
        str | None,
        options.option("--server", envvar="TRIFORCE_SERVER", metavar="URL", help="Ask a running triforce serve."),
    ] = None,
) -> int:
    """Generate text from a prompt of any length, printed as it comes.

    The prompt is --prompt-file, piped stdin and the argument, joined in that order with a blank line between.
    Text goes to stdout; the rest goes to stderr. docs/options.md says more on
    each option, its variable (TRIFORCE_TEMPERATURE=0), and config.yaml.

    [bold]Examples[/bold]

      triforce generate "Write a haiku about long books."

      triforce generate --prompt-file book.txt "Summarize the text above."

      cat book.txt | triforce generate "Who tells this story?" > answer.txt

      triforce generate -f book.txt --raw --temperature 0 -n 200 --json

      triforce generate -f book.txt "How does it end?" --temperature 0 --verify

      triforce generate -f book.txt "What happens in the end?" --memory 22GiB --dry-run

      triforce generate --batch prompts.jsonl --output answers.jsonl

      triforce generate --batch prompts.jsonl --output answers.jsonl --ray auto

      triforce serve & triforce generate -f book.txt "Who tells it?" --server http://127.0.0.1:8000
    """
    check_flags(ctx)
    if batch is not None:
        return _generate_batch(ctx, batch, output)
    terminal = ctx.obj.terminal
    files = files_in(prompt_file or [], terminal.note)
    inputs = [*(("--prompt-file", file) for file in files), *named_files(ctx)]
    path = check_output(output, inputs)
    warn_of_file(ctx, prompt)
    form = parse_output_options(ctx)
    if server is not None:
        text = read_prompt(prompt, files, terminal.stdin, terminal.warn)
        with terminal.writing_to(path), closing(renderer_for(terminal, *astuple(form))) as renderer:
            return run_remote(server, text.text, ctx, renderer)
    request, code = start_or_join_ranks(parse_request(ctx), terminal)
    if code is not None:
        return code
    sources = prompt, files, terminal.stdin, terminal.warn
    text = PromptText(**broadcast(request.group, lambda: asdict(read_prompt(*sources))))
    if request.dry_run and (report := plan_unfetched(request, len(text.text), terminal)) is not None:
        return print_plan(report, "generate", terminal, form.json, form.verbose)
    with (
        terminal.writing_to(path if request.is_first and not request.dry_run else None),
        closing(renderer_for(terminal, *astuple(form))) as renderer,
    ):
        from ..summarize.summary_job import run_generation  # from here on torch is needed

        return run_generation(text, request, terminal, form, renderer)


def _generate_batch(ctx: typer.Context, path: str, output: str | None) -> int:
    """Answer all prompts of a file, or of a part of it; return the exit code."""
    check_distinct([("--batch", path), *named_files(ctx)], "--output", output)
    terminal, form, params = ctx.obj.terminal, parse_output_options(ctx), ctx.params
    request, code = start_or_join_ranks(parse_request(ctx), terminal, params["ray"])
    if code is not None:
        return code
    lines = []
    with ExitStack() as opened:
        results = None
        if request.is_first:
            lines = read_lines(path, terminal.stdin, terminal.warn)
            if output is not None and not request.dry_run:
                results = opened.enter_context(closing(ResultFile(Path(output), terminal.warn)))
        display = BatchDisplay(terminal, not form.quiet, has_file=output is not None)
        opened.callback(display.close)
        display.loading("starting")
        from ..batch.batch_job import BatchOptions, run_batch  # from here on torch is needed

        batch = BatchOptions(lines, name_of(Path(path)), results, params["parallel"] or AUTO, params["ray"])
        return run_batch(batch, request, terminal, form, display)
