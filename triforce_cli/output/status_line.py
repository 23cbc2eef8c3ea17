"""Lines drawn on stderr: the status under text that is still being written, and the bar of a prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from offload.events import Prefilled
from offload.metrics import Meter

from .cursor import visible
from .format import rate, time_left
from .tables import Segment, fitted
from .terminal import Terminal

INTERVAL = 0.1  # seconds between two refreshes
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
        cursor = self._terminal.cursor.copy()
        cursor.resize(self._terminal.size()[0])
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


class PrefillBar(Progress):
    """A line such as `prefill ━━━━━━ 3,072/5,797 tokens · 426/s · 0:06 left · 2,048 from the cache`.

    `pass_tokens` returns how far the forward pass under way is, in tokens; it is called at each refresh, by another
    thread than the pass.
    """

    def __init__(
        self,
        terminal: Terminal,
        label: str,
        meter: Meter,
        pass_tokens: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pass_tokens = pass_tokens
        self._event = Prefilled(0, 0)
        self._restores = False
        console = terminal.console()
        column = _Line(console, lambda: terminal.size()[0], label, meter, lambda: self._restores)
        # It must not touch sys.stdout, which belongs to the text.
        options = {"transient": True, "redirect_stdout": False, "redirect_stderr": False, "get_time": clock}
        super().__init__(column, console=console, **options)

    def observe(self, event: Prefilled) -> None:
        """Show the state after an event that the meter has observed."""
        self._event, self._restores = event, event.restored
        if not self.tasks:
            self.add_task("prefill", total=event.total, completed=event.done)
        else:
            self.update(self.task_ids[0], completed=event.done, total=event.total)

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.tasks and self._pass_tokens is not None:
            task, event = self.tasks[0], self._event
            # The pass may have ended a moment before its event: never backwards.
            task.completed = max(task.completed, min(event.done + self._pass_tokens(), event.total))
        return super().get_renderables()


class _Line(ProgressColumn):
    """The whole line, fitted to the terminal's width."""

    def __init__(
        self, console: Console, columns: Callable[[], int], label: str, meter: Meter, restores: Callable[[], bool]
    ) -> None:
        super().__init__(Column(no_wrap=True))
        self._console, self._columns = console, columns
        self._label, self._meter, self._restores = visible(label), meter, restores

    def render(self, task: Task) -> Text:
        columns, cached = self._columns() - 1, self._meter.cached_tokens
        segments = [
            Segment(f"{int(task.completed):,}/{int(task.total or 0):,} tokens"),
            *self._speed(task),
            *([Segment(f"{cached:,} from the cache", "green", dropped=2)] if cached and not self._restores() else []),
        ]
        label = Text(self._label, style="bold")
        facts = fitted(segments, columns - label.cell_len - _SHORTEST - 2)
        room = columns - label.cell_len - facts.cell_len - 2
        line = Text.assemble(label, " ", self._bar(task, min(room, _LONGEST)), " ", facts)
        line.truncate(columns, overflow="ellipsis")
        return line

    def _speed(self, task: Task) -> list[Segment]:
        """Return the rate of the computed tokens, and the time left at it."""
        if self._restores():
            return [Segment("reading the cache", "green", dropped=1)]
        computed = task.completed - self._meter.cached_tokens
        seconds = (task.elapsed or 0.0) - (self._meter.restore_s or 0.0)
        if computed <= 0 or seconds <= 0:
            return []
        speed = computed / seconds
        return [
            Segment(rate(speed), "cyan", dropped=3),
            Segment(time_left((task.total - task.completed) / speed), "cyan", dropped=1),
        ]

    def _bar(self, task: Task, cells: int) -> Text:
        """Return the bar: restored tokens, computed tokens, and those that are left."""
        cells, total = max(cells, 0), task.total or 1
        cached = round(cells * min(self._meter.cached_tokens, task.completed) / total)
        done = round(cells * task.completed / total)
        mark, rest = ("-", " ") if self._console.options.ascii_only else ("━", "━" if self._uses_color else "─")
        return Text.assemble(
            (mark * cached, "green"), (mark * (done - cached), "bar.complete"), (rest * (cells - done), "bar.back")
        )

    @property
    def _uses_color(self) -> bool:
        return self._console.color_system is not None and not self._console.no_color
