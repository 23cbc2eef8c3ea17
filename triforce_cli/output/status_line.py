"""Lines drawn on stderr: the status under text that is still being written, and the bar of a prefill."""

import time
from collections.abc import Callable

from rich.live import Live
from rich.text import Text

from offload.events import Prefilled
from offload.metrics import Meter

from .cursor import visible
from .format import rate, time_left
from .tables import Segment, fitted
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


_LONGEST, _SHORTEST = 40, 6  # cells of the bar


class PrefillBar(Live):
    """A line such as `prefill ━━━━━━ 3,072/5,797 tokens · 426/s · 0:06 left · 2,048 from the cache`.

    `pass_tokens` returns how far the forward pass under way is, in tokens; it is called at each refresh, by another
    thread than the pass.
    """

    def __init__(
        self,
        terminal: Terminal,
        label: str,
        meter: Meter,
        pass_tokens: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terminal, self._label, self._meter, self._pass_tokens = terminal, visible(label), meter, pass_tokens
        self._clock, self._began = clock, clock()  # Live has attributes of its own: `_started` is one
        self._event, self._done = Prefilled(0, 0), 0.0
        # It must not touch sys.stdout, which belongs to the text.
        options = {"transient": True, "redirect_stdout": False, "redirect_stderr": False, "refresh_per_second": 10}
        super().__init__(console=terminal.console(), get_renderable=self.line, **options)

    def observe(self, event: Prefilled) -> None:
        """Show the state after an event that the meter has observed."""
        self._event, self._done = event, float(event.done)

    def line(self) -> Text:
        """Return the whole line, fitted to the terminal's width."""
        event, columns, cached = self._event, self._terminal.size()[0] - 1, self._meter.cached_tokens
        # The pass may have ended a moment before its event: never backwards.
        self._done = max(self._done, min(event.done + self._pass_tokens(), event.total))
        is_told = cached and not event.restored
        segments = [
            Segment(f"{int(self._done):,}/{event.total:,} tokens"),
            *self._speed(),
            *([Segment(f"{cached:,} from the cache", "green", dropped=2)] if is_told else []),
        ]
        label = Text(self._label, style="bold")
        facts = fitted(segments, columns - label.cell_len - _SHORTEST - 2)
        room = columns - label.cell_len - facts.cell_len - 2
        line = Text.assemble(label, " ", self._bar(max(min(room, _LONGEST), 0)), " ", facts, no_wrap=True)
        line.truncate(columns, overflow="ellipsis")
        return line

    def _speed(self) -> list[Segment]:
        """Return the rate of the computed tokens, and the time left at it."""
        if self._event.restored:
            return [Segment("reading the cache", "green", dropped=1)]
        computed = self._done - self._meter.cached_tokens
        seconds = self._clock() - self._began - (self._meter.restore_s or 0.0)
        if computed <= 0 or seconds <= 0:
            return []
        left = time_left((self._event.total - self._done) * seconds / computed)
        return [Segment(rate(computed / seconds), "cyan", dropped=3), Segment(left, "cyan", dropped=1)]

    def _bar(self, cells: int) -> Text:
        """Return the bar: restored tokens, computed tokens, and those that are left."""
        shares = min(self._meter.cached_tokens, self._done), self._done
        cached, done = (round(cells * share / (self._event.total or 1)) for share in shares)
        is_colored = self.console.color_system is not None and not self.console.no_color
        mark, rest = ("-", " ") if self.console.options.ascii_only else ("━", "━" if is_colored else "─")
        return Text.assemble(
            (mark * cached, "green"), (mark * (done - cached), "bar.complete"), (rest * (cells - done), "bar.back")
        )
