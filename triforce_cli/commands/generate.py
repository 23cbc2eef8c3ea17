"""`triforce generate`: generates text from a prompt, printed as it comes."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from ..distributed.rank import broadcast
from ..input.documents import check_files
from ..input.prompt import read_prompt
from ..options import declarations as options
from ..options import groups as option_groups
from ..options.request import check_flags, parse_output_options, parse_request, start_or_join_ranks
from ..output.renderers import renderer_for


@option_groups.accepts(option_groups.GENERATION)
def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="Text, placed after files and stdin; - is stdin.", show_default=False)
    ] = None,
    prompt_file: options.PromptFiles = None,
) -> int:
    """Generate text from a prompt of any length, printed as it comes.

    The prompt is --prompt-file, piped stdin and the argument, joined in that order with a blank line between.
    Text goes to stdout; progress and statistics go to stderr. Options can also be set in the environment, such as
    TRIFORCE_TEMPERATURE=0. docs/options.md says more on each.

    [bold]Examples[/bold]

      triforce generate "Write a haiku about long books."

      triforce generate --prompt-file book.txt "Summarize the text above."

      cat book.txt | triforce generate "Who tells this story?" > answer.txt

      triforce generate -f book.txt --raw --temperature 0 -n 200 --json

      triforce generate -f book.txt "What happens in the end?" --method lookup --temperature 0 --verify

      triforce generate -f book.txt "What happens in the end?" --memory 22GiB --dry-run
    """
    check_flags(ctx)
    check_files(prompt_file or [])
    terminal = ctx.obj.terminal
    request, code = start_or_join_ranks(parse_request(ctx), terminal)
    if code is not None:
        return code
    text = broadcast(request.group, lambda: read_prompt(prompt, prompt_file or [], terminal.stdin, terminal.warn))

    output = parse_output_options(ctx)
    with closing(renderer_for(terminal, output.json, output.quiet, output.verbose)) as renderer:
        from ..run.generate import run_generation  # from here on torch is needed

        return run_generation(text, request, terminal, output, renderer)
