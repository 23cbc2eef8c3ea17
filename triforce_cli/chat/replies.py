"""What the program itself says in a conversation: notes and errors on stderr, or as JSON lines on stdout."""

from collections.abc import Sequence
from typing import Any

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
        if not self._in_json_line(type="reply", command=command, lines=list(lines)):
            for line in lines:
                self._terminal.note(line)

    def note(self, text: str) -> None:
        """Say what the user should know."""
        if not self._in_json_line(type="note", text=text) and not self._quiet:
            self._terminal.note(text)

    def failed(self, error: Exception) -> None:
        """Say which exception ended an answer or a command, and what to do; the conversation goes on."""
        self._renderer.hide()
        self._terminal.trace(error)
        typed = typed_error(error)
        if not self._in_json_line(type="error", message=typed.message, hint=typed.hint):
            self._terminal.error(typed.message, typed.hint)

    def question(self, number: int, text: str) -> None:
        """Begin the answer to a question, the `number`-th of the conversation."""
        is_together = self._terminal.stdin_is_terminal and self._terminal.stdout_is_terminal
        if not self._in_json_line(type="question", number=number, text=text) and self._answers and not is_together:
            self._terminal.write("\n")  # between two answers without the questions
        self._answers += 1

    def _in_json_line(self, **fields: Any) -> bool:
        """Erase what is drawn; return whether output is JSON, and the fields have been written as a line of it."""
        self._renderer.hide()
        if self._in_json:
            self._terminal.write(json_line(**fields))
        return self._in_json
