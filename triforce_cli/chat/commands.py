"""The commands of a conversation, such as `/undo`, in a table. Everything else that is typed is a question."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from offload.errors import PromptError
from offload.hardware.schema import did_you_mean
from offload.units import counted

from ..input.documents import name_of, read_documents
from .conversation import Conversation, load_conversation
from .session import ChatSession


class Leave(Exception):
    """The user leaves the conversation."""


class Command(NamedTuple):
    """A command: its argument for the help, "" for none, and what runs it."""

    argument: str
    help: str
    run: Callable[[ChatSession, str], None]


def run_command(line: str, chat: ChatSession) -> None:
    """Run a command line. Raises TriforceError with what is wrong with it, Leave, and as the session does."""
    name, _, argument = line.strip().partition(" ")
    command, argument = COMMANDS.get(name), argument.strip()
    if command is None:
        hint = f"{did_you_mean(name, COMMANDS)}/help lists them; // begins a question with a slash"
        raise PromptError(f"there is no command {name}", hint)
    if bool(argument) != bool(command.argument):
        need = "needs an argument" if command.argument else "takes no argument"
        raise PromptError(f"{name} {need}", f"type {name} {command.argument}".rstrip())
    command.run(chat, argument)


def _help(chat: ChatSession, _: str) -> None:
    lines = [f"{f'{name} {each.argument}':<12}  {each.help}" for name, each in COMMANDS.items()]
    chat.replies.reply("/help", *lines, "Ctrl-C stops an answer and keeps what was said; Ctrl-D leaves.")


def _add(chat: ChatSession, argument: str) -> None:
    (document,) = read_documents([_path(argument)], None, chat.replies.note)
    if any(each.name == document.name for each in chat.conversation.documents):
        raise PromptError(f"{document.name} is in this conversation already", "ask about it")
    chat.change(chat.conversation.added(document))
    chat.read_ahead()


def _save(chat: ChatSession, argument: str) -> None:
    path = _path(argument)
    if path.exists():
        try:
            load_conversation(path)
        except PromptError as error:
            raise PromptError(f"nothing is saved: {error.message}", "give /save another name") from None
    chat.save(path)
    chat.replies.reply("/save", f"saved in {name_of(path)}")


def _undo(chat: ChatSession, _: str) -> None:
    chat.conversation = chat.conversation.undone()
    chat.replies.reply("/undo", contents(chat.conversation))


def _clear(chat: ChatSession, _: str) -> None:
    chat.conversation = chat.conversation.cleared()
    chat.replies.reply("/clear", contents(chat.conversation))


def _quit(chat: ChatSession, _: str) -> None:
    raise Leave


def contents(conversation: Conversation) -> str:
    """Return what a conversation consists of, for the user."""
    counts = counted(len(conversation.documents), "file"), counted(len(conversation.turns), "question")
    return f"this conversation has {counts[0]} and {counts[1]}"


def _path(argument: str) -> Path:
    """Return the file that an argument names; quotes around it and a ~ are read as a shell does."""
    if len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "'\"":
        argument = argument[1:-1]
    return Path(argument).expanduser().absolute()


COMMANDS = {
    "/help": Command("", "list the commands", _help),
    "/add": Command("FILE", "add a file; it comes with the next question", _add),
    "/save": Command("FILE", "save the conversation", _save),
    "/undo": Command("", "drop the last question and its answer", _undo),
    "/clear": Command("", "drop all questions and answers, and keep the files", _clear),
    "/exit": Command("", "leave", _quit),
    "/bye": Command("", "leave", _quit),
}
