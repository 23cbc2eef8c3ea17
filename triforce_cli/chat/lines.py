"""Where the lines of a conversation come from: a pipe or a plain terminal; `editor.py` has the one with editing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from offload.errors import PromptError

from ..input.encoding import decode
from ..output.terminal import Terminal
from .replies import Replies

LONGEST = 2**24  # bytes of a line


class Lines(Protocol):
    """The lines that the user types or a program writes."""

    def read(self, status: Callable[[], str]) -> str | None:
        """Return the next line, None at the end; a terminal may show the `status`. Raises KeyboardInterrupt."""

    def unheard(self) -> AbstractContextManager[None]:
        """Return a context in which what is typed waits for the next `read`, and is not echoed into an answer."""


class PlainLines:
    """Lines of a stream as they are, after a prompt on stderr if stdin is a terminal."""

    def __init__(self, terminal: Terminal, replies: Replies) -> None:
        self._terminal = terminal
        self._replies = replies
        stdin: Any = terminal.stdin
        self._stream = getattr(stdin, "buffer", stdin)

    def read(self, status: Callable[[], str]) -> str | None:
        """Return the next line, None at the end. Raises PromptError for one that is no text."""
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
        """Return a context that changes nothing: a plain terminal shows what is typed at once, or never."""
        return nullcontext()
