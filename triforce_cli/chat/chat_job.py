"""Runs a conversation: opens and loads the model, fits the documents to the context, and reads lines until they end."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from offload.errors import PromptError, SettingsError
from offload.settings.method_sizes import forgets
from offload.system.machine import default_home
from offload.units import counted

from ..input.documents import Document
from ..input.excerpts import MIDDLE
from ..options.request import OutputOptions, Request
from ..output.renderers import Renderer, tokenizing
from ..output.terminal import Terminal
from ..run.long_prompts import LongText, room
from ..run.opened_request import OpenedRequest, open_request, stretch
from ..run.run import Run
from .conversation import Conversation
from .loop import Lines, Loop
from .session import ANY_QUESTION, ChatSession, Replies

CONVERSATION = 8192  # tokens beside the documents for which memory is planned, if the context is not given
_FREE = 4  # of the context, for questions and answers beside truncated documents: 1/4
_JOINED = 8  # tokens by which a document in a conversation may exceed the document alone


def run_chat(
    conversation: Conversation,
    path: Path | None,
    context: int | None,
    request: Request,
    terminal: Terminal,
    output: OutputOptions,
    renderer: Renderer,
) -> int:
    """Hold a conversation; return the exit code. Raises as `Run`.

    `path`: the file in which it is saved after each answer; `context`: tokens that it may have, None for the documents
    and `CONVERSATION` more.
    """
    opened = open_request(request, terminal, output.quiet)
    tokenizer = opened.model.tokenizer
    if not tokenizer.has_chat_template:
        hint = "use a model for conversations (often named Instruct), or triforce generate --raw"
        raise PromptError("this model has no chat template, which a conversation needs", hint)
    conversation = conversation.with_ids_of(tokenizer, opened.model.checkpoint.shape.vocab)
    ids = tokenizer.chat_turns(conversation.messages(ANY_QUESTION), tokenizing(renderer), think=opened.think)
    if request.extend_context:
        wanted = context or len(ids) + opened.settings.generation.max_new_tokens
        opened = replace(opened, model=stretch(opened.model, wanted, terminal))
    names = ", ".join(each.name for each in conversation.waiting)
    conversation, tokens = _fitted(conversation, len(ids), LongText(opened, names, terminal, renderer, output.quiet))
    longest = _longest(context, tokens, opened)

    opened.print_settings(opened.settings.generation.max_new_tokens, terminal, output.verbose)
    run = Run(opened, longest, terminal, output, renderer)
    if request.dry_run:
        return run.print_plan()
    run.load()
    replies = Replies(terminal, renderer, output.json, output.quiet)
    limit = None if forgets(opened.settings.speculation) else longest
    session = ChatSession(opened, run, replies, limit, conversation, path)
    if terminal.stdin_is_terminal:
        replies.note(f"{conversation.contents} · /help lists the commands, Ctrl-D leaves")
    return Loop(session, _lines(request, terminal, replies), terminal.stdin_is_terminal).run()


def _longest(asked: int | None, tokens: int, opened: OpenedRequest) -> int:
    """Return the tokens that the conversation may have, which memory is planned for. Raises PromptError."""
    wanted = opened.settings.generation.max_new_tokens
    opened.model.new_tokens(tokens, wanted, False)  # an error where the model has no room at all
    if forgets(opened.settings.speculation):
        return tokens + wanted
    if asked is not None and asked > opened.context:
        message = f"--context is {asked:,}, and the model's context has {counted(opened.context, 'token')}"
        raise SettingsError(message, "use less, or --extend-context")
    longest = min(asked or tokens + max(CONVERSATION, 2 * wanted), opened.context)
    if tokens >= longest:
        message = f"the conversation has {counted(tokens, 'token')}, and --context is {longest:,}"
        raise PromptError(message, "use a larger --context")
    return longest


def _lines(request: Request, terminal: Terminal, replies: Replies) -> Lines:
    """Return where the lines come from: a prompt with editing where the terminal can show one."""
    if not (terminal.stdin_is_terminal and terminal.shows_progress):
        return Lines(terminal, replies)
    from .editor import Editor  # prompt_toolkit takes a tenth of a second

    return Editor(terminal, (request.home or default_home()) / "chat_history")


def _fitted(conversation: Conversation, tokens: int, text: LongText) -> tuple[Conversation, int]:
    """Return the conversation with its waiting documents cut, if they are too long, and its tokens.

    Raises PromptError where a model was chosen and --truncate was not given.
    """
    opened, waiting = text.opened, conversation.waiting
    is_kept = text.is_model_chosen and opened.request.truncate is None
    fits = tokens <= (opened.context - 1 if is_kept else room(opened))
    if fits or not waiting or forgets(opened.settings.speculation):
        return conversation, tokens
    if is_kept:
        raise text.refusal(tokens)
    encode = partial(opened.model.tokenizer.encode, special_tokens=False)
    counts = [len(encode(each.text)) + _JOINED for each in waiting]
    left = min(room(opened), opened.context - opened.context // _FREE) - (tokens - sum(counts))
    cut = []
    for document, count in zip(waiting, counts, strict=True):  # each by the same share
        dropped, most = opened.request.truncate or MIDDLE, max(left * count // sum(counts) - _JOINED, 0)
        cut.append(Document(document.name, text.cut(document.name, document.text, dropped, most, encode)[0]))
    return Conversation(conversation.system, conversation.turns, tuple(cut)), tokens - sum(counts) + left
