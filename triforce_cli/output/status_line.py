"""The status line on stderr, drawn again by a thread while it is shown: below the text, or on a line of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.text import Text

from .terminal import Terminal, rendered

INTERVAL = 0.25  # seconds between two drawings
EDGE = 3  # columns that the line leaves free: it never wraps, nor does a ^C behind it
_ERASE_BELOW, _ERASE_REST = "\x1b[J", "\x1b[K"
# Index keeps the column and scrolls on the last row, so a row below exists and the cursor is where it was.
_MAKE_ROOM = "\x1bD\x1b[A"
_SAVE, _RESTORE, _NEXT_ROW = "\x1b7", "\x1b8", "\r\x1b[B"

Content = Callable[[], Text]


class StatusLine:
    """A line on stderr: below the text where stdout is a terminal too, in a line of its own where it is not.

    All text must go through `write` and `think`. The line is erased before text that reaches its row, and drawn again
    where the cursor certainly stands on an empty cell. Nothing is drawn where stderr is not a terminal or a dumb one.
    """

    def __init__(self, terminal: Terminal, interval: float | None = INTERVAL) -> None:
        """`interval` is None if nothing is drawn by itself."""
        self._terminal, self._interval = terminal, interval
        self._content: Content | None = None
        self._is_drawn = self._is_below = self._is_live = False
        self._due = 0.0
        self._lock = threading.RLock()  # between the thread that draws and the one that writes
        self._thread: threading.Thread | None = None

    def show(self, content: Content, live: bool = True) -> None:
        """Show the line that `content` returns, which has no newlines; draw it again and again if it is `live`."""
        with self._lock:
            is_shown, self._content, self._is_live = content == self._content, content, live
            if not is_shown or time.monotonic() >= self._due:
                self._draw()
            if live and self._thread is None and self._interval is not None and self._terminal.shows_progress:
                self._thread = threading.Thread(target=self._redraw, args=(self._interval,), daemon=True)
                self._thread.start()

    def clear(self) -> None:
        """Erase the line."""
        with self._lock:
            self._erase()
            self._content = None

    def write(self, text: str) -> None:
        """Write text to stdout, around the line."""
        with self._lock:
            terminal = self._terminal
            if text and terminal.thought_open:
                self._erase()
                terminal.end_thought()
            if terminal.stdout_is_terminal:
                self._write(terminal.laid_out(text), terminal.put)
                return
            if self._is_drawn and terminal.text_may_show:
                self._erase()
            terminal.write(text)

    def think(self, text: str) -> None:
        """Write the model's thoughts to stderr, around the line."""
        with self._lock:
            is_shown = self._terminal.stderr_is_terminal
            self._write(self._terminal.laid_out(text) if is_shown else text, self._terminal.think)

    def _write(self, text: str, put: Callable[[str], None]) -> None:
        if text and not (self._is_below and "\n" not in text and self._terminal.layout.exact):
            self._erase()
        put(text)
        if not self._is_drawn:
            self._draw()

    def _redraw(self, interval: float) -> None:
        while True:
            time.sleep(interval)
            with self._lock:
                if self._content is None:
                    self._thread = None
                    return
                if self._is_live:
                    self._draw()

    def _draw(self) -> None:
        terminal = self._terminal
        if self._content is None or not terminal.shows_progress:
            return
        columns, rows = terminal.size()
        shares_the_screen = terminal.stdout_is_terminal or terminal.thought_open
        is_below = shares_the_screen and terminal.layout.column > 0
        if shares_the_screen and (not terminal.layout.exact or rows < 3):
            return
        self._due = time.monotonic() + INTERVAL
        text = self._content()
        text.truncate(max(columns - EDGE, 0), overflow="ellipsis")
        line = rendered(text, terminal.color)
        self._is_drawn, self._is_below = True, is_below
        if is_below:
            terminal.draw(f"{_ERASE_BELOW}{_MAKE_ROOM}{_SAVE}{_NEXT_ROW}{line}{_RESTORE}")
        else:
            terminal.draw(f"\r{line}{_ERASE_REST}")

    def _erase(self) -> None:
        if self._is_drawn:
            self._terminal.draw(_ERASE_BELOW if self._is_below else f"\r{_ERASE_REST}")
        self._is_drawn = False
