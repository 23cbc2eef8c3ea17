"""A prompt with history, editing and completion, by prompt_toolkit. Imported only for a conversation at a terminal."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth, Output, create_output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style

from ..output.terminal import Terminal
from .loop import Lines

try:
    import termios
except ImportError:  # Windows
    termios = None

_PROMPT, _CONTINUED = "> ", "  "
_STYLE = Style.from_dict({"rprompt": "ansibrightblack"})
Completions = Callable[[str], Sequence[tuple[str, int]]]


class Editor(Lines):
    """Lines that are edited before they are sent: Enter sends, Alt-Enter begins a new line, Tab completes."""

    def __init__(self, terminal: Terminal, history: Path, completions: Completions) -> None:
        """`history` is a file for the lines of earlier conversations; `completions` as `commands.completions`."""
        self._terminal = terminal
        self._session: PromptSession[str] = PromptSession(
            _PROMPT,
            multiline=True,
            prompt_continuation=_CONTINUED,
            key_bindings=_keys(),
            history=_history(history),
            completer=_Completer(completions),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,  # the other styles keep empty rows below the prompt
            style=_STYLE,
            color_depth=None if terminal.color else ColorDepth.DEPTH_1_BIT,
            input=create_input(terminal.stdin),
            output=_output(terminal),
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
        return _without_echo(self._terminal.stdin) if termios is not None else nullcontext()


@contextmanager
def _without_echo(stdin: Any) -> Iterator[None]:
    before = termios.tcgetattr(stdin)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(stdin, termios.TCSANOW, silent)
        yield
    finally:
        termios.tcsetattr(stdin, termios.TCSANOW, before)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _output(terminal: Terminal) -> Output:
    """Return the terminal of messages, which also has the prompt where answers go to a file."""
    output = create_output(stdout=terminal.message_stream)
    if hasattr(output, "enable_cpr"):
        output.enable_cpr = False  # the terminal's reply would come late, among what is typed during an answer
    return output


def _history(path: Path) -> History:
    """Return the history in a file that its owner alone can read; in memory where there can be none."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


class _Completer(Completer):
    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    def get_completions(self, document: Document, complete_event: object) -> Iterable[Completion]:
        for text, replaced in self._completions(document.text_before_cursor):
            yield Completion(text, start_position=-replaced)
