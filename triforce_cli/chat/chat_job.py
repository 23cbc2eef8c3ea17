"""Runs a conversation: opens and loads the model, and reads lines until they end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from offload.errors import PromptError, SettingsError
from offload.settings.method_sizes import forgets
from offload.system.machine import default_home
from offload.units import counted

from ..options.command_request import OutputOptions, Request
from ..output.renderers import StreamRenderer
from ..output.terminal import Terminal
from ..run.job import Job, Load
from ..run.long_prompts import Notices
from ..run.model_request import ModelRequest, open_request, stretch
from .chat_session import ChatSession, with_known_ids
from .commands import completions, contents
from .conversation import CONVERSATION, Conversation, Room
from .long_documents import fit_documents, prompt_tokens
from .loop import Lines, Loop, PlainLines
from .replies import Replies


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a conversation begins with.

    Args:
        path: the file in which it is saved after each answer; None for none.
        context: tokens that it may have; None for the documents and `CONVERSATION` more.
        encoding: of text files that are added; None guesses it.
    """

    conversation: Conversation
    path: Path | None = None
    context: int | None = None
    encoding: str | None = None


def run_chat(
    chat: ChatRequest, request: Request, terminal: Terminal, output: OutputOptions, renderer: StreamRenderer
) -> int:
    """Hold a conversation; return the exit code. Raises as `Job.run`."""
    opened = open_request(request, terminal, output.quiet)
    if not opened.model.tokenizer.has_chat_template:
        raise PromptError(
            "this model has no chat template, which a conversation needs",
            "use a model for conversations (often named Instruct), or triforce generate --raw",
        )
    conversation = with_known_ids(chat.conversation, opened)
    if not request.extend_context:
        opened, conversation = fit_documents(conversation, opened, Notices(terminal, renderer, output.quiet))
        conversation = with_known_ids(conversation, opened)
    tokens = prompt_tokens(conversation, opened, renderer)
    if request.extend_context:
        wanted = chat.context or tokens + opened.settings.generation.max_new_tokens
        opened = replace(opened, model=stretch(opened.model, wanted, terminal))
    longest = _longest(chat.context, tokens, opened)

    def work(load: Load) -> int:
        generator = load()
        replies = Replies(terminal, renderer, output.json, output.quiet)
        room = Room(None if forgets(opened.settings.speculation) else longest, opened.context, _counter(opened))
        session = ChatSession(opened, generator, renderer, replies, room, conversation, chat.path, chat.encoding)
        if terminal.stdin_is_terminal:
            replies.note(f"{contents(conversation)} · /help lists the commands, Ctrl-D leaves")
        return Loop(session, _lines(request, terminal, replies), terminal.stdin_is_terminal).run()

    opened.print_settings(opened.settings.generation.max_new_tokens, terminal, output.verbose)
    return Job(opened, longest, terminal, output, renderer).run(work)


def _longest(asked: int | None, tokens: int, opened: ModelRequest) -> int:
    """Return the tokens that the conversation may have, which memory is planned for. Raises PromptError."""
    wanted = opened.settings.generation.max_new_tokens
    if forgets(opened.settings.speculation):
        opened.model.new_tokens(tokens, wanted, False)  # which checks that the cache fits the context
        return tokens + wanted
    if asked is not None and asked > opened.context:
        raise SettingsError(
            f"--context is {asked:,}, and the model's context has {counted(opened.context, 'token')}",
            "use less, or --extend-context",
        )
    longest = min(asked or tokens + max(CONVERSATION, 2 * wanted), opened.context)
    if tokens >= longest:
        opened.model.new_tokens(tokens, wanted, False)  # beyond the model's context, that is an error of its own
        raise PromptError(
            f"the conversation has {counted(tokens, 'token')}, and --context is {longest:,}", "use a larger --context"
        )
    return longest


def _counter(opened: ModelRequest) -> Callable[[str], int]:
    return lambda text: len(opened.model.tokenizer.encode(text, False))


def _lines(request: Request, terminal: Terminal, replies: Replies) -> Lines:
    """Return where the lines come from: a prompt with editing where the terminal can show one."""
    if not (terminal.stdin_is_terminal and terminal.shows_progress):
        return PlainLines(terminal, replies)
    from .editor import Editor  # prompt_toolkit takes a tenth of a second

    return Editor(terminal, (request.home or default_home()) / "chat_history", completions)
