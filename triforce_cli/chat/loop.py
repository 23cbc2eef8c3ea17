"""The loop of a conversation: a line in, an answer or a reply out, until the lines end; `editor.py` edits lines."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import PromptError
from offload.hardware.schema import did_you_mean

from ..input.documents import name_of, read_documents
from ..input.encoding import decode
from ..output.terminal import Terminal
from ..signals import DONE, FAILED, listen
from .session import ChatSession, Replies


class Leave(Exception):
    """The user leaves the conversation."""


class Command(NamedTuple):
    """A command: its argument for the help, "" for none, and what runs it."""

    argument: str
    help: str
    run: Callable[[ChatSession, str], None]


def _help(chat: ChatSession, _: str) -> None:
    lines = [f"{f'{name} {each.argument}':<12}  {each.help}" for name, each in COMMANDS.items()]
    chat.replies.reply("/help", *lines, "Ctrl-C stops an answer and keeps what was said; Ctrl-D leaves.")


def _add(chat: ChatSession, argument: str) -> None:
    (document,) = read_documents([_path(argument)], None, chat.replies.note)
    if any(each.name == document.name for each in chat.conversation.documents):
        raise PromptError(f"{document.name} is in this conversation already", "ask about it")
    chat.change("/add", chat.conversation.added(document))


def _save(chat: ChatSession, argument: str) -> None:
    path = _path(argument)
    if path.exists():
        raise PromptError(f"nothing is saved: {name_of(path)} is there already", "give /save another name")
    chat.save(path)
    chat.replies.reply("/save", f"saved in {name_of(path)}; --session goes on with it")


def _leave(chat: ChatSession, _: str) -> None:
    raise Leave


def _path(argument: str) -> Path:
    """Return the file that an argument names; quotes around it and a ~ are read as a shell does."""
    if len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "'\"":
        argument = argument[1:-1]
    return Path(argument).expanduser().absolute()


COMMANDS = {
    "/help": Command("", "list the commands", _help),
    "/add": Command("FILE", "add a file; it comes with the next question", _add),
    "/save": Command("FILE", "save the conversation", _save),
    "/undo": Command(
        "", "drop the last question and its answer", lambda chat, _: chat.change("/undo", chat.conversation.undone())
    ),
    "/clear": Command(
        "", "drop all questions, and keep the files", lambda chat, _: chat.change("/clear", chat.conversation.cleared())
    ),
    "/exit": Command("", "leave", _leave),
    "/bye": Command("", "leave", _leave),
}


def run_command(line: str, chat: ChatSession) -> None:
    """Run a command line. Raises TriforceError with what is wrong with it, Leave, and as the session does."""
    name, _, argument = line.partition(" ")
    command, argument = COMMANDS.get(name), argument.strip()
    if command is None:
        hint = f"{did_you_mean(name, COMMANDS)}/help lists them; for a question that begins with a slash, type //"
        raise PromptError(f"there is no command {name}", hint)
    if bool(argument) != bool(command.argument):
        need = "needs an argument" if command.argument else "takes no argument"
        raise PromptError(f"{name} {need}", f"type {name} {command.argument}".rstrip())
    command.run(chat, argument)


class Lines:
    """Lines of a stream as they are, after a prompt on stderr if stdin is a terminal."""

    def __init__(self, terminal: Terminal, replies: Replies) -> None:
        self._terminal, self._replies = terminal, replies
        stdin: Any = terminal.stdin
        self._stream = getattr(stdin, "buffer", stdin)

    def read(self, status: Callable[[], str]) -> str | None:
        """Return the next line, None at the end; an editor may show the `status`.

        Raises KeyboardInterrupt, and PromptError for a line that is not text.
        """
        if self._terminal.stdin_is_terminal:
            self._terminal.draw("> ")
        data = self._stream.readline()
        if not data and self._terminal.stdin_is_terminal:
            self._terminal.draw("\n")
        return decode(data, "the line", self._replies.note).rstrip("\n") if data else None

    def unheard(self) -> AbstractContextManager[None]:
        """Return a context in which what is typed waits for the next `read`, without an echo where that can be."""
        return nullcontext()


class Loop:
    """Runs the lines of a conversation. `is_interactive`: somebody types them, who can also correct mistakes."""

    def __init__(self, chat: ChatSession, lines: Lines, is_interactive: bool) -> None:
        self._chat, self._lines, self._is_interactive = chat, lines, is_interactive

    def run(self) -> int:
        """Run lines until they end; return the exit code: failed if a line of a pipe was. Raises KeyboardInterrupt.

        What goes wrong in a line, or is stopped, does not end the conversation.
        """
        failures = 0
        while True:
            stopped = "Ctrl-D or /exit leaves"
            try:
                line = self._lines.read(self._status)
                if line is None:
                    break
                stopped = ""
                with self._lines.unheard():
                    self._run(line.strip())
            except Leave:
                break
            except BrokenPipeError:  # nobody reads the answers any more
                raise
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                listen()
                if stopped:
                    self._chat.replies.note(stopped)
            except Exception as error:
                failures += 1
                self._chat.replies.failed(error)
        return FAILED if failures and not self._is_interactive else DONE

    def _status(self) -> str:
        return f"context {self._chat.used} · {self._chat.opened.settings.engine.model} · /help"

    def _run(self, line: str) -> None:
        if line.startswith("/") and not line.startswith("//"):
            run_command(line, self._chat)
        elif line:
            self._chat.ask(line.removeprefix("/"))
