"""The progress bar of a prefill, redrawn between events too: it moves within a chunk."""

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
