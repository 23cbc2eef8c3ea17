"""Progress on stderr: fetching and loading a model, prefill, then decoding, one line each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from offload.events import DraftPrefilled, Event, Pinned, Prefilled, Tokens
from offload.level_metrics import tokens_per_verification
from offload.metrics import Meter
from offload.units import GIB, counted

from .cursor import visible
from .format import percent, rate, size, time_left
from .status_line import StatusLine
from .tables import Segment, fitted
from .terminal import Terminal

_LONGEST, _SHORTEST = 40, 6  # cells of a prefill's bar
_DESCRIPTION = TextColumn("{task.description}", markup=False)  # a model's name may hold brackets


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts of a generation that the display shows.

    Args:
        context: the model's, in tokens.
        meter: observes the generation's events before they are displayed.
        label: names the part of a document, where this is one.
        pass_tokens: returns how far the forward pass under way is, in tokens, for the bar within a chunk. It is called
            by another thread than that of the pass.
    """

    model: str
    method: str
    context: int
    meter: Meter
    label: str = ""
    pass_tokens: Callable[[], float] = lambda: 0.0


class _Bar(Progress):
    """A progress of rich on stderr that erases itself. It does not touch sys.stdout, which belongs to the text."""

    def __init__(self, terminal: Terminal, *columns: ProgressColumn, **options: Any) -> None:
        options |= {"redirect_stdout": False, "redirect_stderr": False, "transient": True}
        super().__init__(*columns, console=terminal.console(), **options)


class _FactsColumn(ProgressColumn):
    """The column of the styled text that a task has in its field `facts`."""

    def render(self, task: Task) -> Text:
        return Text.assemble(task.fields["facts"])


class PrefillBar(_Bar):
    """A line such as `prefill ━━━━━━ 3,072/5,797 tokens · 426/s · 0:06 left · 2,048 from the cache`."""

    def __init__(self, terminal: Terminal, facts: RunFacts, clock: Callable[[], float] = time.monotonic) -> None:
        label = visible(f"{facts.label} · prefill" if facts.label else "prefill")
        self._room = terminal.size()[0] - len(label) - 3  # for the bar and the facts
        self._cells = BarColumn(_SHORTEST)
        self._meter, self._pass_tokens = facts.meter, facts.pass_tokens
        self._clock, self._began = clock, clock()  # rich has attributes of its own: `_started` is one
        self._event = Prefilled(0, 0)
        super().__init__(terminal, _DESCRIPTION, self._cells, _FactsColumn(Column(no_wrap=True)))
        self._prefill = self.add_task(label, total=None, facts="")

    def observe(self, event: Prefilled) -> None:
        """Show the state after an event that the meter has observed."""
        self._event = event
        self.update(self._prefill, completed=event.done, total=event.total)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the line, moved on by the pass under way; rich calls it at each refresh."""
        for task in self.tasks:  # none while rich begins
            # The pass may have ended a moment before its event: never backwards.
            done = max(task.completed, min(self._event.done + self._pass_tokens(), self._event.total))
            facts = fitted(self._segments(done), self._room - _SHORTEST)
            self._cells.bar_width = max(min(self._room - facts.cell_len, _LONGEST), 0)
            self.update(task.id, completed=done, facts=facts)
        yield self.make_tasks_table(self.tasks)

    def _segments(self, done: float) -> list[Segment]:
        """Return the tokens read, the rate of the computed ones, and the time left at it."""
        event, cached = self._event, self._meter.cached_tokens
        segments = [Segment(f"{int(done):,}/{event.total:,} tokens")]
        if event.restored:
            return [*segments, Segment("reading the cache", "green", dropped=1)]
        seconds = self._clock() - self._began - (self._meter.restore_s or 0.0)
        if (computed := done - cached) > 0 and seconds > 0:
            left = time_left((event.total - done) * seconds / computed)
            segments += [Segment(rate(computed / seconds), "cyan", dropped=3), Segment(left, "cyan", dropped=1)]
        return [*segments, *([Segment(f"{cached:,} from the cache", "green", dropped=2)] if cached else [])]


class DownloadBar(_Bar):
    """A bar while a model is fetched: a context manager, called with what is fetched, units done and units in all.

    It draws nothing where stderr is no terminal.
    """

    def __init__(self, terminal: Terminal, shown: bool = True) -> None:
        columns = _DESCRIPTION, BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
        super().__init__(terminal, *columns, disable=not (shown and terminal.shows_progress))
        self._terminal = terminal
        self._fetched: dict[str, Any] = {}

    def __enter__(self) -> DownloadBar:
        return self  # not started yet: a model that is already on disk needs no bar

    def __call__(self, description: str, done: int, total: int) -> None:
        if description not in self._fetched:
            if not self._fetched and self._terminal.before_line is not None:
                self._terminal.before_line()  # erases the spinner
            self.start()
            self._fetched[description] = self.add_task(description, total=total)
        self.update(self._fetched[description], completed=done)


class ProgressDisplay:
    """The progress on stderr. Draws nothing if not `shown` or where stderr is no terminal; text is always written.

    Loading and prefill are rich bars, because stdout is still silent; decoding is a `StatusLine` under the text.
    """

    def __init__(self, terminal: Terminal, shown: bool = True) -> None:
        self._terminal = terminal
        self._shown = shown and terminal.shows_progress
        self._status = StatusLine(terminal)
        self._bar: _Bar | None = None
        self._facts: RunFacts | None = None
        terminal.before_line = self.hide

    def loading(self, text: str) -> None:
        """Show a spinner beside this text, until something else is shown."""
        if not self._shown:
            return
        if self._bar is not None and not isinstance(self._bar, PrefillBar):
            self._bar.update(self._bar.task_ids[0], description=text)
            return
        self.hide()
        self._bar = _Bar(self._terminal, SpinnerColumn(), _DESCRIPTION)
        self._bar.start()
        self._bar.add_task(text, total=None)

    def start(self, facts: RunFacts) -> None:
        """Prepare for the events of a generation: the model is loaded and prefill begins."""
        self.hide()
        self._facts = facts

    def event(self, event: Event) -> None:
        """Redraw after an event that the meter has observed."""
        if not self._shown or self._facts is None:
            return
        if isinstance(event, Prefilled):
            if not isinstance(self._bar, PrefillBar):
                self._hide_bar()
                self._bar = PrefillBar(self._terminal, self._facts)
            self._bar.observe(event)
            self._bar.start()
        elif isinstance(event, Pinned):
            self.loading(f"pinning host memory: {event.done / GIB:.0f} of {event.total / GIB:.0f} GiB")
        elif isinstance(event, DraftPrefilled):
            self.loading(f"the draft model reads {event.done:,}/{event.total:,} tokens")
        elif isinstance(event, Tokens):
            self._hide_bar()
            if self._terminal.stdout_is_terminal or not self._terminal.text_may_show:
                facts = self._facts
                self.status(lambda: decoding_line(facts, self._terminal.size()[0] - 1))
            # Text that comes back through a pipe cannot be drawn around.

    def status(self, content: Callable[[], Text]) -> None:
        """Show a line, which `content` returns when it is time to draw it, instead of the bar."""
        if self._shown:
            self._hide_bar()
            self._status.refresh(content)

    def write(self, text: str) -> None:
        """Write text to stdout, around whatever is shown."""
        if text:
            if self._terminal.text_may_show:
                self._hide_bar()  # both would use the same line; the next event draws it again
            self._status.write(text)

    def think(self, text: str) -> None:
        """Write the model's thoughts to stderr, around whatever is shown."""
        self._hide_bar()
        self._status.think(text)

    def hide(self) -> None:
        """Erase everything; the next event draws it again."""
        self._hide_bar()
        self._status.clear()

    def close(self) -> None:
        """Erase everything and draw nothing more. May be called again."""
        self.hide()
        self._shown = False

    def _hide_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()


def decoding_line(facts: RunFacts, columns: int) -> Text:
    """Return the status of decoding: tokens, rate, method, acceptance, context, and traffic over the link."""
    meter, speed = facts.meter, facts.meter.tokens_per_s
    segments = [Segment(facts.label, "bold")] if facts.label else []
    segments += [
        Segment("decode", "bold"),
        Segment(counted(meter.new_tokens, "token"), dropped=1),
        Segment(f"{speed:.1f}/s" if speed else "…/s", "cyan"),
        *map(Segment, _speculation(facts.method, meter)),
        Segment(f"context {meter.prompt_tokens + meter.new_tokens:,}/{facts.context:,}", dropped=2),
    ]
    if meter.transferred is not None:
        busy = percent(meter.link_utilisation or 0.0)
        segments.append(Segment(f"link {size(meter.transferred.bytes)} {busy}", dropped=3))
    return fitted(segments, columns)


def _speculation(method: str, meter: Meter) -> list[str]:
    """Return the method and its current drafter, the acceptance of each drafter, and the tokens a verification."""
    if method == "auto" and meter.speculated is not None:
        using = meter.speculated.using
        method = f"auto: {'plain' if using == 'none' else using}"
    rates = {row: row.acceptance for row in meter.levels if row.acceptance is not None}
    if not rates:
        return [method]
    drafters = [row.drafter for row in rates]
    # A drafter may draft for two levels; only then its name alone is ambiguous.
    shown = [
        f"{row.drafter}→{row.verifier} {percent(rate)}"
        if drafters.count(row.drafter) > 1
        else f"{row.drafter} {percent(rate)}"
        for row, rate in rates.items()
    ]
    return [method, ", ".join(shown), f"{tokens_per_verification(meter.levels):.1f}/verification"]
