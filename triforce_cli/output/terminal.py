"""The standard streams and their terminal; all output goes through here.

stdout carries the generated text, unchanged; everything else is a line on stderr.
"""

import os
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from .cursor import Cursor, visible
from .output_files import whole_file
from .tables import hanging

_RED, _YELLOW, _CYAN, _DIM = "1;31", "1;33", "1;36", "2"
_NO_STREAM = (AttributeError, OSError, ValueError)  # raised by no stream at all, one in memory, or a closed one


class _VisibleConsole(Console):
    """A rich console that makes control characters visible: the texts it draws have names of files and models."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


class Terminal:
    """The three standard streams. Only isatty decides whether one is a terminal, never FORCE_COLOR.

    Colour: the `color` choice, then NO_COLOR, then TERM=dumb, then FORCE_COLOR, then whether the stream is a terminal.
    A dumb terminal gets no status line and no escape sequences either.

    Attributes:
        cursor: where the text on the screen has left the cursor.
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
        self.cursor = Cursor(self.size()[0])
        self.before_line: Callable[[], None] | None = None
        self.thought_open = False
        self._files: list[IO[str]] = []  # in the place of stdout
        self._line_open = False  # on the screen
        self._text_open = False  # stdout does not end with a newline

    @contextmanager
    def writing_to(self, paths: Sequence[Path]) -> Iterator[None]:
        """Write to files in the place of stdout, to the first one until `use_file`; without any, write to stdout.

        The files are replaced at the end. Raises OSError.
        """
        if not paths:
            yield
            return
        before = self._stdout, self.stdout_is_terminal, self.stdout_color
        with ExitStack() as opened:
            self._files = [opened.enter_context(whole_file(path)) for path in paths]
            self._stdout, self.stdout_is_terminal, self.stdout_color = self._files[0], False, False
            try:
                yield
            finally:
                self._files = []
                self._stdout, self.stdout_is_terminal, self.stdout_color = before
                self._line_open = self._text_open = False

    def use_file(self, number: int) -> None:
        """Write to another one of several files; of one, or of none, it stays the same."""
        if len(self._files) > 1 and self._stdout is not self._files[number]:
            self._stdout, self._line_open, self._text_open = self._files[number], False, False

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

    def console(self) -> Console:
        """Return a rich console on stderr that follows this terminal's colour choice alone."""
        known = {name: self._environ[name] for name in ("TERM", "COLORTERM") if name in self._environ}
        return _VisibleConsole(
            file=self._stderr,
            force_terminal=self.shows_progress,
            color_system="auto" if self.color else None,
            no_color=not self.color,
            highlight=False,
            markup=False,
            emoji=False,
            _environ=known,  # or rich would read FORCE_COLOR and COLUMNS itself
        )

    def write(self, text: str) -> None:
        """Write text to stdout: UTF-8, flushed, never through rich; on a terminal, control characters made visible.

        Raises BrokenPipeError if the reader has closed the pipe.
        """
        if not text:
            return
        self.end_thought()
        if self.stdout_is_terminal:
            text = visible(text)
            self._move(text)
        self._put(text, text.endswith("\n"))

    def print(self, text: Text) -> None:
        """Write the program's own styled text to stdout, coloured where colours are wanted there.

        In columns, names of files and models must have gone through `visible` before: that makes some longer. Raises as
        `write`.
        """
        if not self.stdout_color:
            self.write(text.plain)
            return
        console = _VisibleConsole(
            file=StringIO(), force_terminal=True, color_system="standard", width=10_000, _environ={}, highlight=False
        )
        with console.capture() as captured:
            console.print(text, end="", soft_wrap=True)
        self._put(captured.get(), text.plain.endswith("\n"))

    def _put(self, text: str, ends_line: bool) -> None:
        self._line_open = self._text_open = not ends_line  # first: an interrupt may leave the rest in the buffer
        raw = getattr(self._stdout, "buffer", None)
        if raw is None:
            self._stdout.write(text)
        else:
            raw.write(text.encode("utf-8", errors="replace"))
        self._stdout.flush()

    def _move(self, text: str) -> None:
        """Move the cursor as this text on the screen does."""
        self.cursor.resize(self.size()[0])
        self.cursor.feed(text)

    def think(self, text: str) -> None:
        """Write a model's thoughts to stderr, dimmed where colours are wanted; what follows begins a line."""
        if self.stderr_is_terminal:
            text = visible(text)
            self._move(text)
        self.thought_open = not text.endswith("\n")
        self.draw(f"\x1b[{_DIM}m{text}\x1b[0m" if self.color else text)

    def end_thought(self) -> None:
        """End the line of a model's thoughts, if one is open, and leave one blank."""
        if self.thought_open:
            self.thought_open = False
            self.draw("\n\n")
            if self.stderr_is_terminal:
                self._move("\n\n")

    def end_line(self) -> None:
        """End the line that the text has left open on the screen; files and pipes are not changed."""
        if self.stdout_is_terminal and self._line_open:
            self.write("\n")
        elif self._line_open and self.stderr_is_terminal and self.text_may_show:
            self._line_open = False
            self.draw("\n")  # on stderr: what goes through the pipe stays exact

    def end_text(self) -> None:
        """End the complete text with a newline, in files and pipes too, unless it has one or is empty."""
        if self._text_open:
            self.write("\n")
        self.end_line()

    def after_ctrl_c(self) -> None:
        """Begin a new line on stderr: the terminal has echoed ^C into the current one."""
        self.end_thought()
        if self.stderr_is_terminal and not (self.stdout_is_terminal and self._line_open):
            self.draw("\n")

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
