"""What the program itself says in a conversation: notes and errors on stderr, or as JSON lines on stdout."""

from __future__ import annotations

from collections.abc import Sequence

from offload.errors import typed_error

from ..output.renderers import Renderer
from ..output.stdout_formats import json_line
from ..output.terminal import Terminal


class Replies:
    """Says what is not an answer of the model. `quiet` leaves out what was not asked for."""

    def __init__(self, terminal: Terminal, renderer: Renderer, in_json: bool, quiet: bool) -> None:
        self._terminal = terminal
        self._renderer = renderer
        self._in_json, self._quiet = in_json, quiet
        self._answers = 0

    def reply(self, command: str, lines: Sequence[str]) -> None:
        """Say what a command has to say."""
        self._renderer.hide()
        if self._in_json:
            self._terminal.write(json_line(type="reply", command=command, lines=list(lines)))
            return
        for line in lines:
            self._terminal.note(line)

    def note(self, text: str) -> None:
        """Say what the user should know."""
        self._renderer.hide()
        if self._in_json:
            self._terminal.write(json_line(type="note", text=text))
        elif not self._quiet:
            self._terminal.note(text)

    def error(self, message: str, hint: str) -> None:
        """Say what went wrong, and what to do; the conversation goes on."""
        self._renderer.hide()
        if self._in_json:
            self._terminal.write(json_line(type="error", message=message, hint=hint))
        else:
            self._terminal.error(message, hint)

    def failed(self, error: Exception) -> None:
        """Say which exception ended an answer or a command."""
        self._renderer.hide()
        self._terminal.trace(error)
        typed = typed_error(error)
        self.error(typed.message, typed.hint)

    def question(self, number: int, text: str) -> None:
        """Begin the answer to a question, the `number`-th of the conversation."""
        self._renderer.hide()
        if self._in_json:
            self._terminal.write(json_line(type="question", number=number, text=text))
        elif self._answers and not (self._terminal.stdin_is_terminal and self._terminal.stdout_is_terminal):
            self._terminal.write("\n")  # between two answers without the questions
        self._answers += 1
