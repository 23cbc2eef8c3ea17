"""The loop of a conversation: a line in, an answer or a reply out, until the lines end; `editor.py` edits lines."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from offload.errors import TriforceError

from ..input.encoding import decode
from ..output.terminal import Terminal
from ..signals import DONE, FAILED, listen
from .commands import Leave, run_command
from .session import ChatSession, Replies


class Lines:
    """Lines of a stream as they are, after a prompt on stderr if stdin is a terminal."""

    def __init__(self, terminal: Terminal, replies: Replies) -> None:
        self._terminal, self._replies = terminal, replies
        stdin: Any = terminal.stdin
        self._stream = getattr(stdin, "buffer", stdin)

    def read(self, status: Callable[[], str]) -> str | None:
        """Return the next line, None at the end; an editor may show the `status`.

        Raises KeyboardInterrupt, and PromptError for a line that is no text.
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
        self._failures = 0

    def run(self) -> int:
        """Run lines until they end; return the exit code: failed if a line of a pipe was. Raises KeyboardInterrupt."""
        self._attempt(self._chat.read_ahead, "stopped; the next question reads the rest")
        try:
            while (line := self._read()) is not None:
                self._attempt(partial(self._run, line))
        except Leave:
            pass
        return FAILED if self._failures and not self._is_interactive else DONE

    def _read(self) -> str | None:
        """Return the next line that says something; None at the end."""
        while True:
            try:
                line = self._lines.read(self._status)
                if line is None or line.strip():
                    return line
            except KeyboardInterrupt:
                self._interrupted("Ctrl-D or /exit leaves")
            except TriforceError as error:
                self._fail(error)

    def _status(self) -> str:
        return f"context {self._chat.used} · {self._chat.opened.settings.engine.model} · /help"

    def _run(self, line: str) -> None:
        line = line.strip()
        if line.startswith("/") and not line.startswith("//"):
            run_command(line, self._chat)
        else:
            self._chat.ask(line[1:] if line.startswith("//") else line)

    def _attempt(self, run: Callable[[], None], stopped: str = "") -> None:
        """Run a part of the conversation. What goes wrong in it, or is stopped, does not end the conversation."""
        try:
            with self._lines.unheard():
                run()
        except (Leave, BrokenPipeError):  # nobody reads the answers any more
            raise
        except Exception as error:
            self._fail(error)
        except KeyboardInterrupt:
            self._interrupted(stopped)

    def _interrupted(self, note: str) -> None:
        """Go on after Ctrl-C of somebody who types. Raises it again over a pipe."""
        if not self._is_interactive:
            raise
        listen()
        if note:
            self._chat.replies.note(note)

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        self._chat.replies.failed(error)
