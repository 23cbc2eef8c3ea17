"""The standard streams and their terminal; all output goes through here.

stdout carries the generated text; everything else is a line on stderr. Pipes and files get the text unchanged.
"""

import os
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import IO, Any

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from .output_files import whole_file
from .tables import hanging
from .text_layout import TextLayout, visible

_RED, _YELLOW, _CYAN, _DIM = "1;31", "1;33", "1;36", "2"
_NO_STREAM = (AttributeError, OSError, ValueError)  # raised by no stream at all, one in memory, or a closed one


class Terminal:
    """The three standard streams. Only isatty decides whether one is a terminal, never FORCE_COLOR.

    Colour: the `color` choice, then NO_COLOR, then TERM=dumb, then FORCE_COLOR, then whether the stream is a terminal.
    A dumb terminal gets no status line and no escape sequences either.

    Attributes:
        wraps: whether text on a terminal is broken between words.
        layout: where the text on the screen has left the cursor.
        before_line: called before a line is printed, to erase what is drawn on stderr.
        thought_open: stderr ends with a model's thoughts and no newline.
    """

    def __init__(
        self,
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
        stdin: IO[str] | None = None,
        environ: Mapping[str, str] | None = None,
        color: str = "auto",
    ) -> None:
        self._stdout: Any = sys.stdout if stdout is None else stdout
        self._stderr: Any = sys.stderr if stderr is None else stderr
        self.stdin: Any = sys.stdin if stdin is None else stdin
        self._environ = os.environ if environ is None else environ
        self.stdout_is_terminal, self.stderr_is_terminal, self.stdin_is_terminal = map(
            _is_terminal, (self._stdout, self._stderr, self.stdin)
        )
        is_dumb = self._environ.get("TERM", "").lower() in ("dumb", "unknown")
        self.shows_progress = self.stderr_is_terminal and not is_dumb  # what is drawn can be erased again
        self.color, self.stdout_color = (
            _uses_color(color, self._environ, is_dumb, on_terminal)
            for on_terminal in (self.stderr_is_terminal, self.stdout_is_terminal)
        )
        self.wraps = False
        self.layout = TextLayout(lambda: self.table_width or self.size()[0])
        self.before_line: Callable[[], None] | None = None
        self.thought_open = False
        self._line_open = False  # on the screen
        self._text_open = False  # stdout does not end with a newline

    @contextmanager
    def writing_to(self, path: Path | None) -> Iterator[None]:
        """Write to a file in the place of stdout, which is replaced at the end; None for stdout. Raises OSError."""
        if path is None:
            yield
            return
        before = self._stdout, self.stdout_is_terminal, self.stdout_color
        with whole_file(path) as file:
            self._stdout, self.stdout_is_terminal, self.stdout_color = file, False, False
            try:
                yield
            finally:
                self._stdout, self.stdout_is_terminal, self.stdout_color = before
                self._line_open = self._text_open = False

    @property
    def text_may_show(self) -> bool:
        """Return whether stdout may appear on the same screen: directly, or through a pipe (`| tee a.txt`)."""
        with suppress(*_NO_STREAM):
            mode = os.fstat(self._stdout.fileno()).st_mode
            return self.stdout_is_terminal or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
        return self.stdout_is_terminal

    @property
    def message_stream(self) -> Any:
        """The stream of messages, for a library that draws on its terminal by itself."""
        return self._stderr

    def size(self) -> tuple[int, int]:
        """Return the current columns and rows of stderr's terminal; 80 and 24 where they are unknown."""
        columns, rows = _size(self._stderr)
        return columns or 80, rows or 24

    @property
    def table_width(self) -> int | None:
        """The columns that a table on stdout may take; None where stdout is not a terminal."""
        return _size(self._stdout)[0] or 80 if self.stdout_is_terminal else None

    def write(self, text: str) -> None:
        """Write text to stdout: UTF-8, flushed; on a terminal, as `laid_out` says.

        Raises BrokenPipeError if the reader has closed the pipe.
        """
        if text:
            self.end_thought()
            self.put(self.laid_out(text) if self.stdout_is_terminal else text)

    def laid_out(self, text: str) -> str:
        """Return text for the screen: control characters visible and, if the terminal `wraps`, broken between words."""
        return self.layout.feed(text) if self.wraps else self.layout.unbroken(text)

    def print(self, text: Text) -> None:
        """Write the program's own styled text to stdout, coloured where colours are wanted there.

        In columns, names of files and models must have gone through `visible` before: that makes some longer. Raises as
        `write`.
        """
        self.put(rendered(text, self.stdout_color))

    def put(self, text: str) -> None:
        """Write text to stdout as it is. Raises BrokenPipeError."""
        if not text:
            return
        self._line_open = self._text_open = not text.endswith("\n")  # first: an interrupt may leave some in the buffer
        raw = getattr(self._stdout, "buffer", None)
        if raw is None:
            self._stdout.write(text)
        else:
            raw.write(text.encode("utf-8", errors="replace"))
        self._stdout.flush()

    def think(self, text: str) -> None:
        """Write a model's thoughts, as laid out, to stderr, dimmed where colours are wanted."""
        self.thought_open = not text.endswith("\n") or self.layout.holds_word
        self.draw(self._dimmed(text))

    def end_thought(self) -> None:
        """End the line of a model's thoughts, if one is open, and leave one blank."""
        if self.thought_open:
            self.thought_open = False
            self.draw(self._dimmed(self.layout.rest()) + "\n\n")
            self.layout.feed("\n")

    def _dimmed(self, text: str) -> str:
        return f"\x1b[{_DIM}m{text}\x1b[0m" if self.color and text else text

    def end_line(self) -> None:
        """End the line that the text has left open on the screen; files and pipes are not changed."""
        if self.stdout_is_terminal:
            self.put(self.layout.rest())
        if self.stdout_is_terminal and self._line_open:
            self.put(self.laid_out("\n"))
        elif self._line_open and self.stderr_is_terminal and self.text_may_show:
            self._line_open = False
            self.draw("\n")  # on stderr: what goes through the pipe stays exact

    def end_text(self) -> None:
        """End the complete text with a newline, in files and pipes too, unless it has one or is empty."""
        self.end_line()
        if self._text_open:
            self.write("\n")

    def after_ctrl_c(self) -> None:
        """Erase the ^C that the terminal has echoed behind the text; begin a new line where its place is unknown."""
        if not self.stderr_is_terminal:
            return
        if not self.shows_progress or not self.layout.exact or (self._line_open and not self.stdout_is_terminal):
            self.draw("\n")
            return
        column = self.layout.column
        self.draw(f"\r\x1b[{column}C\x1b[K" if column else "\r\x1b[K")

    def note(self, text: str, indent: int = 0) -> None:
        """Print one line to stderr. On a terminal, this and all messages are wrapped between words.

        Further lines are indented by `indent` cells.
        """
        self._say(text, indent=indent)

    def warn(self, text: str) -> None:
        """Print one line to stderr: `warning: …`."""
        self._say(text, "warning:", _YELLOW)

    def error(self, message: str, hint: str = "") -> None:
        """Print lines to stderr: `error: …` and, for each line of the hint, `hint: …`."""
        self._say(message, "error:", _RED)
        for line in hint.splitlines():
            self._say(line, "hint:", _CYAN)

    def trace(self, error: BaseException) -> None:
        """Print where an error was raised to stderr, if TRIFORCE_DEBUG is set."""
        if self._environ.get("TRIFORCE_DEBUG", "") not in ("", "0"):
            if self.before_line is not None:
                self.before_line()
            self.draw(visible("".join(traceback.format_exception(error))))

    def _say(self, text: str, label: str = "", style: str = "", indent: int = 0) -> None:
        """Print a message on one line, with its label in colour: names of files and errors are not trusted."""
        if self.before_line is not None:
            self.before_line()
        self.end_thought()
        parts = [label, *(part for line in text.splitlines() if (part := line.strip()))]
        line = visible(" ".join(filter(None, parts)))
        if self.stderr_is_terminal:
            with suppress(OSError):  # the next write to stdout raises it; the message must still be printed
                self.end_line()
            line = "\n".join(hanging(line, indent, self.size()[0]))
        self.draw(f"\x1b[{style}m{label}\x1b[0m{line[len(label) :]}\n" if label and self.color else f"{line}\n")

    def draw(self, text: str) -> None:
        """Write raw text to stderr, escape sequences included. Nothing is raised if stderr is closed."""
        with suppress(*_NO_STREAM):
            encoding = getattr(self._stderr, "encoding", None) or "utf-8"
            self._stderr.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
            self._stderr.flush()


def rendered(text: Text, color: bool) -> str:
    """Return styled text with or without its colours, control characters made visible."""
    if not color:
        return visible(text.plain)
    console = Console(file=StringIO(), _environ={})
    return "".join(_colored(visible(part.text), part.style) for part in text.render(console, end=""))


def _colored(text: str, style: Style | None) -> str:
    """Return text in a style that ends with each line."""
    if style is None:
        return text
    lines = (style.render(line, color_system=ColorSystem.STANDARD) if line else "" for line in text.split("\n"))
    return "\n".join(lines)


def _uses_color(choice: str, environ: Mapping[str, str], is_dumb: bool, on_terminal: bool) -> bool:
    if choice != "auto":
        return choice == "always"
    if environ.get("NO_COLOR") or is_dumb:
        return False
    return environ.get("FORCE_COLOR", "") not in ("", "0") or on_terminal


def _size(stream: Any) -> tuple[int, int]:
    """Return the columns and rows of the stream's terminal; 0 and 0 where they are unknown."""
    try:
        return os.get_terminal_size(stream.fileno())
    except _NO_STREAM:
        return 0, 0


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except _NO_STREAM:
        return False
