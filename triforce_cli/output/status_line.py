"""The status line on stderr, under text that is still being written."""

import time
from collections.abc import Callable

from rich.text import Text

from .cursor import visible
from .terminal import Terminal

INTERVAL = 0.25  # seconds between two refreshes: drawing a line takes about as long as a token
_ERASE_BELOW = "\x1b[J"
# Index keeps the column and scrolls on the last row, so a row below exists and the cursor is where it was.
_MAKE_ROOM = "\x1bD\x1b[A"
_SAVE, _RESTORE = "\x1b7", "\x1b8"
_NEXT_ROW = "\r\x1b[B"
_ERASE_LINE = "\r\x1b[K"


class StatusLine:
    """A status line on stderr: below the text where stdout is a terminal too, in a line of its own where it is not.

    All text must go through `write` while the line is drawn. It is erased before text that would reach its row or that
    would leave the cursor in pending wrap (`Cursor`), where erasing removes the last character, and drawn again as soon
    as the cursor stands on an empty cell. Where stderr is no terminal or a dumb one, only the text is written.
    """

    def __init__(self, terminal: Terminal, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal, self._console, self._clock = terminal, terminal.console(), clock
        self._content: Text | None = None
        self._drawn = self._is_below = False
        self._due = float("-inf")

    @property
    def _shares_the_screen(self) -> bool:
        """Return whether text is on the line where the cursor is."""
        return self._terminal.stdout_is_terminal or self._terminal.thought_open

    def write(self, text: str) -> None:
        """Write text to stdout, around the status line."""
        if text and self._terminal.thought_open:
            self._erase()
            self._terminal.end_thought()
        self._write(text, self._terminal.write)

    def think(self, text: str) -> None:
        """Write the model's thoughts to stderr, around the status line."""
        if not self._is_below:  # the line is where the text is to be
            self._erase()
        self._write(text, self._terminal.think)

    def _write(self, text: str, put: Callable[[str], None]) -> None:
        cursor = self._terminal.cursor
        if self._drawn and self._shares_the_screen:
            cursor.resize(self._terminal.size()[0])
            if not cursor.stays(visible(text)):
                self._erase()
        put(text)
        if self._shares_the_screen and self._content is not None and not self._drawn:
            self._draw(self._content)

    def refresh(self, content: Callable[[], Text]) -> None:
        """Draw the content, which is called only if the last refresh is `INTERVAL` ago; its text has no newlines."""
        if self._terminal.shows_progress and self._clock() >= self._due:
            self._due = self._clock() + INTERVAL
            self._content = content()
            self._draw(self._content)

    def clear(self) -> None:
        """Erase the line until the next refresh."""
        self._erase()
        self._content, self._due = None, float("-inf")

    def _draw(self, content: Text) -> None:
        (columns, rows), cursor, is_below = self._terminal.size(), self._terminal.cursor, self._shares_the_screen
        cursor.resize(columns)
        if is_below and (not cursor.settled or rows < 3):
            return
        text = content.copy()
        text.truncate(max(columns - 1, 0), overflow="ellipsis")  # one short of the width: no wrap, and none pending
        with self._console.capture() as captured:
            self._console.print(text, end="", soft_wrap=True)
        if is_below:
            self._terminal.draw(f"{_ERASE_BELOW}{_MAKE_ROOM}{_SAVE}{_NEXT_ROW}{captured.get()}{_RESTORE}")
        else:
            self._terminal.draw(f"{_ERASE_LINE}{captured.get()}")
        self._drawn, self._is_below = True, is_below

    def _erase(self) -> None:
        if not self._drawn:
            return
        if not self._is_below:
            self._terminal.draw(_ERASE_LINE)
        elif self._terminal.cursor.settled:
            self._terminal.draw(_ERASE_BELOW)
        else:  # after a resize
            self._terminal.draw(f"{_SAVE}{_NEXT_ROW}{_ERASE_BELOW}{_RESTORE}")
        self._drawn = False
