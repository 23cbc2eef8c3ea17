"""The loop of a conversation: a line in, an answer or a reply out, until the lines end; `editor.py` edits lines."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from offload.errors import PromptError, TriforceError

from ..input.encoding import decode
from ..output.terminal import Terminal
from ..signals import DONE, FAILED, listen
from .chat_session import ChatSession
from .commands import Leave, is_command, run_command
from .replies import Replies

LONGEST = 2**24  # bytes of a line


class Lines:
    """Lines of a stream as they are, after a prompt on stderr if stdin is a terminal."""

    def __init__(self, terminal: Terminal, replies: Replies) -> None:
        self._terminal = terminal
        self._replies = replies
        stdin: Any = terminal.stdin
        self._stream = getattr(stdin, "buffer", stdin)

    def read(self, status: Callable[[], str]) -> str | None:
        """Return the next line, None at the end; an editor may show the `status`.

        Raises KeyboardInterrupt, and PromptError for a line that is no text.
        """
        if self._terminal.stdin_is_terminal:
            self._terminal.draw("> ")
        data = self._stream.readline(LONGEST)
        if not data and self._terminal.stdin_is_terminal:
            self._terminal.draw("\n")
        if len(data) == LONGEST:
            while data and not data.endswith(b"\n"):
                data = self._stream.readline(LONGEST)
            raise PromptError(f"a line has more than {LONGEST:,} bytes", "give a long text as a file: /add FILE")
        return decode(data, "the line", self._replies.note).rstrip("\n") if data else None

    def unheard(self) -> AbstractContextManager[None]:
        """Return a context in which what is typed waits for the next `read`, without an echo where that can be.

        Here it changes nothing: a plain terminal shows what is typed at once, or never.
        """
        return nullcontext()


class Loop:
    """Runs the lines of a conversation. `is_interactive`: somebody types them, who can also correct mistakes."""

    def __init__(self, chat: ChatSession, lines: Lines, is_interactive: bool) -> None:
        self._chat = chat
        self._lines = lines
        self._is_interactive = is_interactive
        self._failures = 0

    def run(self) -> int:
        """Run lines until they end; return the exit code: failed if a line of a pipe was. Raises KeyboardInterrupt."""
        self._attempt(self._chat.read_ahead, "stopped; the next question reads the rest")
        try:
            while (line := self._read()) is not None:
                self._attempt(lambda line=line: self._run(line))
        except Leave:
            pass
        return FAILED if self._failures and not self._is_interactive else DONE

    def _read(self) -> str | None:
        """Return the next line that says something; None at the end."""
        while True:
            try:
                line = self._lines.read(self._status)
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                listen()
                self._chat.replies.note("Ctrl-D or /quit leaves")
                continue
            except TriforceError as error:
                self._fail(error)
                continue
            if line is None or line.strip():
                return line

    def _status(self) -> str:
        limit = self._chat.room.limit
        of = "" if limit is None else f"/{limit:,}"
        return f"context {self._chat.used:,}{of} · {self._chat.opened.settings.engine.model} · /help"

    def _run(self, line: str) -> None:
        line = line.strip()
        if is_command(line):
            run_command(line, self._chat)
        else:
            self._chat.ask(line[1:] if line.startswith("//") else line)

    def _attempt(self, run: Callable[[], None], stopped: str = "") -> None:
        """Run a part of the conversation. What goes wrong in it, or is stopped, does not end the conversation.

        `stopped` is said after Ctrl-C.
        """
        try:
            with self._lines.unheard():
                run()
        except (Leave, BrokenPipeError):  # nobody reads the answers any more
            raise
        except Exception as error:
            self._fail(error)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            listen()
            if stopped:
                self._chat.replies.note(stopped)

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        self._chat.replies.failed(error)
