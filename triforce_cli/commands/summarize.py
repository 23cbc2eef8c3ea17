"""`triforce summarize`: summarizes documents or answers questions about them, live."""

from contextlib import closing
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from offload.errors import PromptError, SettingsError

from ..distributed.rank import broadcast
from ..input.documents import STDIN, Document, files_in, has_input, read_documents
from ..input.excerpts import Range, parse_position
from ..options import declarations as options
from ..options.checks import check_output, named_files
from ..options.declarations import AUTO, parse_parallel
from ..options.request import Request, check_flags, parse_output_options, parse_request, start_or_join_ranks
from ..output.renderers import renderer_for
from ..output.terminal import Terminal
from ..summarize.instructions import DEFAULT_LENGTH, LENGTHS, AnswerStyle, Templates, load_templates

_of_parts = partial(options.option, rich_help_panel="Parts and templates")
_position = partial(_of_parts, parser=parse_position, metavar="WHERE")


@options.accepts(options.READING | {"max_new_tokens": options.with_default("max_new_tokens", "by --length")})
def summarize(
    ctx: typer.Context,
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="Documents; - is stdin.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        list[str] | None, _of_parts("--prompt-file", "-f", metavar="FILE", help="Another way to name a document.")
    ] = None,
    output: Annotated[str | None, options.option("--output", "-o", metavar="FILE", help="Write here.")] = None,
    length: Annotated[
        str | None,
        options.option(
            metavar="LENGTH",
            help=options.described("short, medium, long, or 200 words.", DEFAULT_LENGTH),
            among=list(LENGTHS),
        ),
    ] = None,
    bullets: Annotated[bool, typer.Option("--bullets", help="Ask for bullet points.")] = False,
    focus: Annotated[str | None, options.option(metavar="TEXT", help="A topic to focus on.")] = None,
    question: Annotated[
        list[str] | None, options.option("--question", metavar="TEXT", help="Answer this; repeatable.")
    ] = None,
    language: Annotated[str | None, options.option(metavar="NAME", help="Write in this language.")] = None,
    prompt: Annotated[
        Path | None, _of_parts("--prompt", metavar="FILE", help="Template with {document} and {instruction}.")
    ] = None,
    together: Annotated[bool, _of_parts("--together", help="One summary of all files.")] = False,
    start: Annotated[Any, _position("--from", help="Start at this token, or percent (10%).")] = None,
    end: Annotated[Any, _position("--to", help="End at this token, or percent.")] = None,
    parallel: Annotated[
        str,
        _of_parts(metavar="N", help=options.described("Texts to generate at a time.", "1"), among=(AUTO,)),
    ] = "1",
) -> int:
    """Summarize documents, or answer questions about them.

    Text, Markdown, PDF, EPUB, DOCX and HTML (pip install ".\\[documents]"), and folders of them. Several questions
    about one document read it once. A document that exceeds the context is read in parts, unless --truncate,
    --extend-context, or --from and --to are given.

    [bold]Examples[/bold]

      triforce summarize book.txt --length short

      triforce summarize report.pdf --bullets --focus "costs and dates" > report.md

      triforce summarize book.txt --question "Who tells it?" --question "Where does it end?"

      cat book.txt | triforce summarize --bullets | tee out.md

      triforce summarize chapter-*.txt --together --language German

      triforce summarize books/ --length "300 words" --parallel 4
    """
    check_flags(ctx)
    terminal = ctx.obj.terminal
    sources = files_in(_sources(prompt_file or [], files or [], terminal), terminal.note)
    inputs = [*(("", source) for source in sources), *named_files(ctx), ("--prompt", prompt)]
    path = check_output(output, inputs)
    if not all(text.strip() for text in question or []):
        raise SettingsError("a question is empty", 'ask something, such as --question "Who tells this story?"')
    at_once = parse_parallel(parallel)
    style = AnswerStyle(length, bullets, focus, language)
    templates = load_templates(prompt)
    _check_template(templates, prompt, ctx)
    request, code = start_or_join_ranks(_with_length(parse_request(ctx), style), terminal)
    if code is not None:
        return code
    read = broadcast(request.group, lambda: list(map(astuple, read_documents(sources, terminal.stdin, terminal.warn))))
    form = parse_output_options(ctx)
    with (
        terminal.writing_to(path if request.is_first and not request.dry_run else None),
        closing(renderer_for(terminal, *astuple(form))) as renderer,
    ):
        from ..summarize.summary_job import SummaryRequest, run_summaries  # from here on torch is needed

        documents, piece = [Document(*fields) for fields in read], Range(start, end)
        summary = SummaryRequest(documents, question or [], style, templates, piece, together, at_once)
        return run_summaries(summary, request, terminal, form, renderer)


def _sources(prompt_files: list[str], files: list[str], terminal: Terminal) -> list[str]:
    """Return the documents' files; without any, standard input if something is piped into it. Raises PromptError."""
    if given := [*prompt_files, *files]:
        return given
    if not has_input(terminal.stdin):
        raise PromptError(
            "no document", "give a file (triforce summarize book.txt) or a pipe (cat book.txt | triforce summarize)"
        )
    return [str(STDIN)]


def _check_template(templates: Templates, path: Path | None, ctx: typer.Context) -> None:
    """Raise SettingsError for an option whose text the template has no placeholder for."""
    if "{instruction}" in templates.document.text:
        return
    for name in ("question", "length", "bullets", "focus", "language"):
        if ctx.params[name]:
            raise SettingsError(
                f"the template {path} has no {{instruction}}, which --{name} needs",
                "put {instruction} into it",
            )


def _with_length(request: Request, style: AnswerStyle) -> Request:
    """Return the request with the most tokens that the length needs, unless --max-new-tokens was given."""
    settings = request.settings
    if "max_new_tokens" in settings.values:
        return request
    generation = replace(settings.generation, max_new_tokens=style.new_tokens)
    values = dict(settings.values) | {"max_new_tokens": style.new_tokens}
    return replace(request, settings=replace(settings, generation=generation, values=values))
