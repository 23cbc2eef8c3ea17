"""Runs a conversation: opens and loads the model, fits the documents to the context, and reads lines until they end.

As for `generate` and `summarize`, nothing is left out where a model was chosen, unless --truncate asks for it."""

from dataclasses import dataclass, replace
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
from ..run.long_prompts import Commands, Notices, is_model_chosen, room, short, too_long, truncated
from ..run.opened_request import OpenedRequest, open_request, stretch
from ..run.run import Run
from .commands import contents
from .conversation import Conversation
from .loop import Lines, Loop
from .session import ANY_QUESTION, ChatSession, Replies, with_known_ids

CONVERSATION = 8192  # tokens beside the documents for which memory is planned, if the context is not given
_FREE = 4  # of the context, for questions and answers beside truncated documents: 1/4
_JOINED = 8  # tokens by which a document in a conversation may exceed the document alone


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a conversation begins with.

    Args:
        path: the file in which it is saved after each answer; None for none.
        context: tokens that it may have; None for the documents and `CONVERSATION` more.
    """

    conversation: Conversation
    path: Path | None = None
    context: int | None = None


def run_chat(chat: ChatRequest, request: Request, terminal: Terminal, output: OutputOptions, renderer: Renderer) -> int:
    """Hold a conversation; return the exit code. Raises as `Run`."""
    opened = open_request(request, terminal, output.quiet)
    if not opened.model.tokenizer.has_chat_template:
        hint = "use a model for conversations (often named Instruct), or triforce generate --raw"
        raise PromptError("this model has no chat template, which a conversation needs", hint)
    conversation = with_known_ids(chat.conversation, opened)
    if request.extend_context:
        tokens = _tokens(conversation, opened, renderer)
        wanted = chat.context or tokens + opened.settings.generation.max_new_tokens
        opened = replace(opened, model=stretch(opened.model, wanted, terminal))
    else:
        opened, conversation = _fitted(conversation, opened, Notices(terminal, renderer, output.quiet))
        conversation = with_known_ids(conversation, opened)
        tokens = _tokens(conversation, opened, renderer)
    longest = _longest(chat.context, tokens, opened)

    opened.print_settings(opened.settings.generation.max_new_tokens, terminal, output.verbose)
    run = Run(opened, longest, terminal, output, renderer)
    if request.dry_run:
        return run.print_plan()
    run.load()
    replies = Replies(terminal, renderer, output.json, output.quiet)
    limit = None if forgets(opened.settings.speculation) else longest
    session = ChatSession(opened, run, replies, limit, conversation, chat.path)
    if terminal.stdin_is_terminal:
        replies.note(f"{contents(conversation)} · /help lists the commands, Ctrl-D leaves")
    return Loop(session, _lines(request, terminal, replies), terminal.stdin_is_terminal).run()


def _longest(asked: int | None, tokens: int, opened: OpenedRequest) -> int:
    """Return the tokens that the conversation may have, which memory is planned for. Raises PromptError."""
    wanted = opened.settings.generation.max_new_tokens
    if forgets(opened.settings.speculation):
        opened.model.new_tokens(tokens, wanted, False)  # which checks that the cache fits the context
        return tokens + wanted
    if asked is not None and asked > opened.context:
        message = f"--context is {asked:,}, and the model's context has {counted(opened.context, 'token')}"
        raise SettingsError(message, "use less, or --extend-context")
    longest = min(asked or tokens + max(CONVERSATION, 2 * wanted), opened.context)
    if tokens >= longest:
        opened.model.new_tokens(tokens, wanted, False)  # beyond the model's context, that is an error of its own
        message = f"the conversation has {counted(tokens, 'token')}, and --context is {longest:,}"
        raise PromptError(message, "use a larger --context")
    return longest


def _lines(request: Request, terminal: Terminal, replies: Replies) -> Lines:
    """Return where the lines come from: a prompt with editing where the terminal can show one."""
    if not (terminal.stdin_is_terminal and terminal.shows_progress):
        return Lines(terminal, replies)
    from .editor import Editor  # prompt_toolkit takes a tenth of a second

    return Editor(terminal, (request.home or default_home()) / "chat_history")


def _tokens(conversation: Conversation, opened: OpenedRequest, renderer: Renderer) -> int:
    """Return the tokens of a conversation with the shortest question."""
    messages, progress = conversation.messages(ANY_QUESTION), tokenizing(renderer)
    return len(opened.model.tokenizer.chat_turns(messages, progress, think=opened.think))


def _fitted(conversation: Conversation, opened: OpenedRequest, notices: Notices) -> tuple[OpenedRequest, Conversation]:
    """Return the request and the conversation that fits: as it is, with a longer model, or with truncated documents.

    Raises PromptError where a model was chosen and --truncate was not given.
    """
    request, waiting = opened.request, conversation.waiting
    tokens = _tokens(conversation, opened, notices.renderer)
    is_kept = is_model_chosen(request) and request.truncate is None
    fits = tokens <= (opened.context - 1 if is_kept else room(opened))
    if fits or not waiting or forgets(opened.settings.speculation):
        return opened, conversation
    names, wanted = ", ".join(each.name for each in waiting), tokens + opened.settings.generation.max_new_tokens
    commands = Commands(request, notices.terminal, names)
    if is_kept:
        raise commands.refusal(too_long(opened, tokens), wanted)
    if request.truncate is None and (longer := notices.with_longer_model(opened, wanted, short(names))) is not None:
        return longer, conversation
    rest = _tokens(replace(conversation, waiting=()), opened, notices.renderer)
    left = min(room(opened), opened.context - opened.context // _FREE) - rest
    why = "" if request.truncate else commands.reason(opened, wanted)
    return opened, replace(conversation, waiting=_cut(waiting, opened, left, why, notices))


def _cut(
    documents: tuple[Document, ...], opened: OpenedRequest, left: int, why: str, notices: Notices
) -> tuple[Document, ...]:
    """Return the documents, of which long ones are cut to equal lengths, so that all take `left` tokens."""
    encode, found = partial(opened.model.tokenizer.encode, special_tokens=False), list(documents)
    counts = [len(encode(each.text)) + _JOINED for each in documents]
    for done, index in enumerate(sorted(range(len(counts)), key=counts.__getitem__)):
        share, document = left // (len(counts) - done), documents[index]
        if counts[index] > share:
            dropped, most = opened.request.truncate or MIDDLE, max(share - _JOINED, 0)
            cut, ids = truncated(opened, document.name, document.text, dropped, most, encode)
            notices.truncated(cut, why, opened.request.dry_run)
            found[index], counts[index] = replace(document, text=cut.text), len(ids) + _JOINED
        left -= counts[index]
    return tuple(found)
