"""`triforce chat`: a conversation about documents."""

import os
from contextlib import closing
from dataclasses import astuple, replace
from pathlib import Path
from typing import Annotated

import typer

from offload.errors import PromptError, SettingsError
from offload.units import parse_tokens

from ..chat.conversation import Conversation, load_conversation
from ..distributed.launch import ranks_to_start
from ..distributed.rank import world_position
from ..input.documents import STDIN, checked, files_in, read_documents
from ..options import declarations as options
from ..options.checks import check_distinct, named_files
from ..options.request import check_flags, parse_output_options, parse_request
from ..output.renderers import renderer_for

_NOT_HERE = ("raw", "verify", *options.FORMS)


@options.accepts({name: option for name, option in options.READING.items() if name not in _NOT_HERE})
def chat(
    ctx: typer.Context,
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="Documents, and folders of them.", show_default=False)
    ] = None,
    prompt_file: options.PromptFiles = None,
    session: Annotated[
        str | None, options.option("--session", metavar="FILE", help="Go on with this; saved there.")
    ] = None,
    context: Annotated[
        int | None,
        options.option(
            "--context",
            help=options.described("Most tokens of the conversation.", "files and 8K"),
            parser=parse_tokens,
            metavar="TOKENS",
            rich_help_panel=options.CONTEXT,
        ),
    ] = None,
) -> int:
    """Ask questions about documents, one after the other. The documents are read once.

    Questions are typed at a prompt, or come through a pipe, one on each line. A line that begins with a slash is a
    command: /help lists them. Ctrl-C stops an answer, Ctrl-D leaves.

    [bold]Examples[/bold]

      triforce chat book.txt

      triforce chat book.txt --session book.json

      printf 'Who tells it?\\nTo whom?\\n' | triforce chat book.txt --temperature 0

      triforce chat book.txt --json < questions.txt
    """
    check_flags(ctx)
    sources = [*(prompt_file or []), *(files or [])]
    if STDIN in checked(sources):
        raise PromptError("standard input has the questions, and cannot be a file too", "give the file by its name")
    sources = files_in(sources, ctx.obj.terminal.note)
    path = None if session is None else Path(session).expanduser().absolute()
    check_distinct([*(("-f", file) for file in sources), *named_files(ctx)], "--session", path)
    terminal, request = ctx.obj.terminal, parse_request(ctx)
    if terminal.stdin is None:
        raise PromptError("standard input is closed", "questions are typed, or come through a pipe")
    if world_position(os.environ) is not None or ranks_to_start(request.settings):
        raise SettingsError("a conversation runs on one GPU", "use --tensor-parallel 1")
    conversation = _conversation(path, request.system)
    known = {document.name for document in conversation.documents}  # as they were read then
    for document in read_documents(sources, None, terminal.warn):
        conversation = conversation if document.name in known else conversation.added(document)

    output = parse_output_options(ctx)
    with closing(renderer_for(terminal, *astuple(output))) as renderer:
        from ..chat.chat_job import run_chat  # from here on torch is needed

        return run_chat(conversation, path, context, request, terminal, output, renderer)


def _conversation(path: Path | None, system: str | None) -> Conversation:
    """Return the conversation to go on with, or a new one. Raises PromptError."""
    if path is None or not path.exists():
        if path is not None and not path.parent.is_dir():
            raise PromptError(f"there is no folder {path.parent} for --session", "make it, or give another file")
        return Conversation(system)
    saved = load_conversation(path)
    return saved if system is None else replace(saved, system=system)
