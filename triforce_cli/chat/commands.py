"""The commands of a conversation, such as `/undo`, in a table. Everything else that is typed is a question."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import PromptError
from offload.hardware.schema import did_you_mean
from offload.units import counted

from ..input.documents import name_of, read_documents
from ..output.statistics import detail_lines, statistics_line
from .answer_settings import PARAMETERS, described, parse_parameter
from .chat_session import ChatSession
from .conversation import Conversation, load_conversation

PREFIX = "/"
FILE, PARAMETER = "FILE", "NAME VALUE"  # arguments that are completed


class Leave(Exception):
    """The user leaves the conversation."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its argument for the help ("" for none, [] around one that may be left out), and what runs it."""

    name: str
    argument: str
    help: str
    run: Callable[[ChatSession, str], None]


def is_command(line: str) -> bool:
    """Return whether a line is a command; a question that begins with a slash is written with two."""
    return line.startswith(PREFIX) and not line.startswith(2 * PREFIX)


def run_command(line: str, chat: ChatSession) -> None:
    """Run a command line. Raises TriforceError with what is wrong with it, Leave, and as the session does."""
    name, _, argument = line.strip().partition(" ")
    command = COMMANDS.get({"/exit": "/quit", "/bye": "/quit", "/?": "/help"}.get(name, name))
    if command is None:
        hint = f"{did_you_mean(name, COMMANDS)}/help lists them; // begins a question with a slash"
        raise PromptError(f"there is no command {name}", hint)
    argument = argument.strip()
    if argument and not command.argument:
        raise PromptError(f"{name} takes no argument", f"type {name} alone")
    if not argument and command.argument and not command.argument.startswith("["):
        raise PromptError(f"{name} needs an argument", f"type {name} {command.argument}")
    command.run(chat, argument)


def _help(chat: ChatSession, _: str) -> None:
    width = max(len(f"{each.name} {each.argument}") for each in COMMANDS.values())
    lines = [f"{f'{each.name} {each.argument}':<{width}}  {each.help}" for each in COMMANDS.values()]
    chat.replies.reply("/help", [*lines, "Ctrl-C stops an answer and keeps what was said; Ctrl-D leaves."])


def _files(chat: ChatSession, _: str) -> None:
    documents, waiting = chat.conversation.documents, chat.conversation.waiting
    lines = [
        f"{each.name}  {counted(chat.room.count(each.text), 'token')}"
        + ("  (comes with the next question)" if number >= len(documents) - len(waiting) else "")
        for number, each in enumerate(documents)
    ]
    chat.replies.reply("/files", lines or ["there are no files: /add FILE adds one"])


def _add(chat: ChatSession, argument: str) -> None:
    (document,) = read_documents([_path(argument)], None, chat.replies.note, chat.encoding)
    if any(each.name == document.name for each in chat.conversation.documents):
        raise PromptError(f"{document.name} is in this conversation already", f"/remove {document.name} drops it")
    added = chat.conversation.added(document)
    chat.check(added)
    chat.conversation = added
    chat.read_ahead()


def _remove(chat: ChatSession, argument: str) -> None:
    known = [each.name for each in chat.conversation.documents]
    chat.conversation = chat.conversation.removed(argument if argument in known else name_of(_path(argument)))
    _say_what_is_left(chat, "/remove")


def _system(chat: ChatSession, argument: str) -> None:
    if not argument:
        current = chat.conversation.system
        chat.replies.reply("/system", [current or "there is no system message: /system TEXT sets one"])
        return
    chat.change_system(None if argument == "none" else argument)
    again = "; the next question reads the files again" if chat.conversation.documents else ""
    chat.replies.reply("/system", [f"the system message is {'removed' if argument == 'none' else 'set'}{again}"])


def _set(chat: ChatSession, argument: str) -> None:
    name, _, value = argument.removeprefix("parameter ").partition(" ")  # ollama: /set parameter temperature 0.3
    if value.strip():
        chat.set(parse_parameter(name, value.strip()))
    chat.replies.reply("/set", described(chat.opened, name))


def _stats(chat: ChatSession, _: str) -> None:
    turns, limit = chat.conversation.turns, chat.room.limit
    of = "" if limit is None else f" of {limit:,}"
    lines = [f"{counted(len(turns), 'question')} answered · {chat.used:,}{of} tokens of the context in use"]
    if chat.summary is not None:
        lines += [statistics_line(chat.summary), *detail_lines(chat.summary)]
    chat.replies.reply("/stats", lines)


def _save(chat: ChatSession, argument: str) -> None:
    path = _path(argument)
    if path.exists():
        try:
            load_conversation(path)
        except PromptError as error:
            raise PromptError(f"nothing is saved: {error.message}", "give /save another name") from None
    chat.save(path)
    chat.replies.reply("/save", [f"saved in {name_of(path)}"])


def _load(chat: ChatSession, argument: str) -> None:
    loaded = load_conversation(_path(argument))
    if chat.conversation != chat.saved and chat.conversation.turns:
        raise PromptError(
            f"{counted(len(chat.conversation.turns), 'question')} of this conversation would be lost",
            "/save FILE keeps them, /clear drops them; then /load again",
        )
    chat.resume(loaded)
    _say_what_is_left(chat, "/load")
    chat.read_ahead()


def _undo(chat: ChatSession, _: str) -> None:
    chat.conversation = chat.conversation.undone()
    _say_what_is_left(chat, "/undo")


def _forget(chat: ChatSession, argument: str) -> None:
    count = int(argument) if argument.isascii() and argument.isdigit() and len(argument) < 10 else 0
    if not 1 <= count <= len(chat.conversation.turns):
        there = counted(len(chat.conversation.turns), "question")
        raise PromptError(f"/forget {argument}: this conversation has {there}", "/forget 1 drops the oldest one")
    chat.conversation = chat.conversation.forgotten(count)
    _say_what_is_left(chat, "/forget")


def _clear(chat: ChatSession, _: str) -> None:
    chat.conversation = chat.conversation.forgotten(len(chat.conversation.turns))
    chat.unanswered = None
    _say_what_is_left(chat, "/clear")


def _quit(chat: ChatSession, _: str) -> None:
    raise Leave


def _say_what_is_left(chat: ChatSession, command: str) -> None:
    chat.replies.reply(command, [contents(chat.conversation)])


def contents(conversation: Conversation) -> str:
    """Return what a conversation consists of, for the user."""
    counts = counted(len(conversation.documents), "file"), counted(len(conversation.turns), "question")
    return f"this conversation has {counts[0]} and {counts[1]}"


def _path(argument: str) -> Path:
    """Return the file that an argument names; quotes around it and a ~ are read as a shell does."""
    if len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "'\"":
        argument = argument[1:-1]
    try:
        return Path(argument).expanduser().absolute()
    except RuntimeError as error:
        raise PromptError(f"{argument}: {error}", "give the path in full") from None


COMMANDS = {
    each.name: each
    for each in (
        Command("/help", "", "list the commands", _help),
        Command("/files", "", "list the files that the model reads", _files),
        Command("/add", FILE, "add a file; it comes with the next question", _add),
        Command("/remove", FILE, "drop a file", _remove),
        Command("/system", "[TEXT]", "show or set the system message; none removes it", _system),
        Command("/set", f"[{PARAMETER}]", "show or set the sampling, such as /set temperature 0.3", _set),
        Command("/stats", "", "show the numbers of the last answer, and the context in use", _stats),
        Command("/save", FILE, "save the conversation", _save),
        Command("/load", FILE, "go on with a saved conversation", _load),
        Command("/undo", "", "drop the last question and its answer", _undo),
        Command("/retry", "", "answer the last question again", lambda chat, _: chat.retry()),
        Command("/forget", "N", "drop the oldest N questions and their answers", _forget),
        Command("/clear", "", "drop all questions and answers, and keep the files", _clear),
        Command("/quit", "", "leave", _quit),
    )
}


def completions(line: str) -> Sequence[tuple[str, int]]:
    """Return what a line that is being typed may become: the end of it, and how many characters that replaces."""
    name, space, argument = line.partition(" ")
    if not is_command(line):
        return []
    if not space:
        return [(each, len(line)) for each in COMMANDS if each.startswith(line)]
    wanted = COMMANDS[name].argument if name in COMMANDS else ""
    if wanted == FILE:
        return [(each, len(argument)) for each in _files_beginning(argument)]
    if PARAMETER in wanted and " " not in argument:
        return [(each, len(argument)) for each in PARAMETERS if each.startswith(argument)]
    return []


def _files_beginning(beginning: str) -> list[str]:
    """Return the paths that begin so, folders with a slash at the end."""
    folder, slash, name = beginning.rpartition("/")
    try:
        entries = sorted(Path(f"{folder}{slash}" or ".").expanduser().iterdir())
        return [
            f"{folder}{slash}{each.name}{'/' if each.is_dir() else ''}"
            for each in entries
            if each.name.startswith(name) and (name or not each.name.startswith("."))
        ]
    except (OSError, RuntimeError):
        return []
