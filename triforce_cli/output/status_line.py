"""The status line on stderr, under text that is still being written."""

import time
from collections.abc import Callable

from rich.text import Text

from .cursor import visible
from .terminal import Terminal

INTERVAL = 0.25  # seconds between two refreshes: to draw a line takes about as long as what is between two tokens
_ERASE_BELOW = "\x1b[J"
# Index keeps the column and scrolls on the last row, so a row below exists and the cursor is where it was.
_MAKE_ROOM = "\x1bD\x1b[A"
_SAVE, _RESTORE = "\x1b7", "\x1b8"
_NEXT_ROW = "\r\x1b[B"
_ERASE_LINE = "\r\x1b[K"


class StatusLine:
    """A status line on stderr: below the text where stdout is a terminal too, in a line of its own where it is not.

    All text must go through `write` while the line is drawn. The line is erased before text would reach its row
    and drawn again after it. Nothing is erased or drawn while the cursor is in pending wrap (`Cursor`): it stands on
    the last character then, which erasing would remove and which the next character would overwrite after a move.
    Where stderr is no terminal or a dumb one, only the text is written.
    """

    def __init__(self, terminal: Terminal, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = terminal
        self._console = terminal.console()
        self._clock = clock
        self._content: Text | None = None
        self._drawn = False
        self._drawn_below = False
        self._due = float("-inf")

    @property
    def _below(self) -> bool:
        """Return whether text is on the line where the cursor is."""
        return self._terminal.stdout_is_terminal or self._terminal.thought_open

    def write(self, text: str) -> None:
        """Write text to stdout, around the status line."""
        if text and self._terminal.thought_open:
            self._erase_if_drawn()
            self._terminal.end_thought()
        self._write(text, self._terminal.write)

    def think(self, text: str) -> None:
        """Write what a model thinks to stderr, around the status line."""
        if self._drawn and not self._drawn_below:  # on the line where the text is to be
            self._erase()
        self._write(text, self._terminal.think)

    def _write(self, text: str, put: Callable[[str], None]) -> None:
        if not (self._drawn and self._below):
            put(text)
        else:
            self._write_around(visible(text), put)
        if self._below and self._content is not None and not self._drawn:
            self._draw()

    def _write_around(self, text: str, put: Callable[[str], None]) -> None:
        cut = self._erasable_after(text)
        if cut is None:  # the text does not reach the row below, or erasing is not safe anywhere
            put(text)
            return
        put(text[:cut])
        self._erase()
        put(text[cut:])

    def _erasable_after(self, text: str) -> int | None:
        """Return how many characters to write before the line is erased; None to leave it drawn."""
        cursor = self._terminal.cursor
        cursor.resize(self._terminal.size()[0])
        if cursor.stays(text):
            return None
        cursor = cursor.copy()
        start = cursor.row
        cut = 0 if cursor.settled else None
        for index, char in enumerate(text, start=1):
            cursor.feed(char)
            if cut is None and cursor.settled:
                cut = index
        return cut if cursor.row > start or not cursor.exact else None

    def refresh(self, content: Callable[[], Text]) -> None:
        """Draw the content, which is called only if the last refresh is `INTERVAL` ago; its text has no newlines."""
        if self._terminal.shows_progress and self._clock() >= self._due:
            self._due = self._clock() + INTERVAL
            self._content = content()
            self._draw()

    def clear(self) -> None:
        """Erase the line until the next refresh."""
        self._erase_if_drawn()
        self._content, self._due = None, float("-inf")

    def _draw(self) -> None:
        assert self._content is not None
        columns, rows = self._terminal.size()
        cursor = self._terminal.cursor
        cursor.resize(columns)
        if self._below and (not cursor.settled or rows < 3):
            return
        line = self._render(columns - 1)  # one short of the width: no wrap, and none pending
        if self._below:
            line = f"{_ERASE_BELOW}{_MAKE_ROOM}{_SAVE}{_NEXT_ROW}{line}{_RESTORE}"
        else:
            line = f"{_ERASE_LINE}{line}"
        self._terminal.draw(line)
        self._drawn, self._drawn_below = True, self._below

    def _erase_if_drawn(self) -> None:
        if self._drawn:
            self._erase()

    def _erase(self) -> None:
        if not self._drawn_below:
            self._terminal.draw(_ERASE_LINE)
        elif self._terminal.cursor.settled:
            self._terminal.draw(_ERASE_BELOW)
        else:  # only a clear in mid-line comes here, and a newline follows it: the wrap need not survive
            self._terminal.draw(f"{_SAVE}{_NEXT_ROW}{_ERASE_BELOW}{_RESTORE}")
        self._drawn = False

    def _render(self, cells: int) -> str:
        text = self._content.copy()
        text.truncate(max(cells, 0), overflow="ellipsis")
        with self._console.capture() as captured:
            self._console.print(text, end="", soft_wrap=True)
        return captured.get()
