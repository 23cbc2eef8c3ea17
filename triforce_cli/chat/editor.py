"""A prompt with history, editing and completion, by prompt_toolkit. Imported only for a conversation at a terminal."""

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.output import ColorDepth, create_output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style

from offload.system.platform import without_echo

from ..output.terminal import Terminal
from .loop import COMMANDS, Lines


class Editor(Lines):
    """Lines that are edited before they are sent: Enter sends, Alt-Enter begins a new line, Tab completes."""

    def __init__(self, terminal: Terminal, history: Path) -> None:
        """`history` is a file for the lines of earlier conversations."""
        self._terminal = terminal
        keys = KeyBindings()
        keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
        keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
        output = create_output(stdout=terminal.message_stream)  # which has the prompt where answers go to a file
        if hasattr(output, "enable_cpr"):
            output.enable_cpr = False  # the terminal's reply would come late, among what is typed during an answer
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=keys,
            history=_history(history),
            completer=_Commands(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,  # the other styles keep empty rows below the prompt
            style=Style.from_dict({"rprompt": "ansibrightblack"}),
            color_depth=None if terminal.color else ColorDepth.DEPTH_1_BIT,
            input=create_input(terminal.stdin),
            output=output,
        )

    def read(self, status: Callable[[], str]) -> str | None:
        """Return the next text that is sent, None after Ctrl-D. Raises KeyboardInterrupt."""
        self._terminal.end_line()
        try:
            text = self._session.prompt(rprompt=status())
        except EOFError:
            return None
        return text.encode("utf-8", "replace").decode("utf-8")  # bytes that are no text arrive as lone surrogates

    def unheard(self) -> AbstractContextManager[None]:
        """Return a context that does not echo what is typed; the next `read` has it, and Ctrl-C interrupts as ever."""
        return without_echo(self._terminal.stdin)


def _history(path: Path) -> History:
    """Return the history in a file that its owner alone can read; in memory where there can be none."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


class _Commands(Completer):
    """Completes commands, and the names of files after them."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        name, space, argument = document.text_before_cursor.partition(" ")
        if not space:
            yield from (Completion(each, -len(name)) for each in COMMANDS if name and each.startswith(name))
        elif name in COMMANDS and COMMANDS[name].argument:
            yield from PathCompleter(expanduser=True).get_completions(Document(argument), complete_event)
