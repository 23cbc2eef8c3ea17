"""Progress on stderr while the engine works: loading, prefill, then decoding, one line each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psutil
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from offload.events import Event, Prefilled, Tokens
from offload.metrics import Meter, tokens_per_verification
from offload.units import GIB, counted

from .format import percent, size
from .status_line import StatusLine
from .terminal import Terminal

_PREFILL_TEXT = 56  # columns that all but the bar take: "prefill 104,000/104,000 tokens 1,234/s · 12:34 left"
_ONE_LINE = Column(no_wrap=True)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts of a generation that the display shows.

    Args:
        context: the model's, in tokens.
        meter: observes the generation's events before they are displayed.
        device_memory: returns the bytes in use on a GPU, where the model runs on one.
        label: names the part of a document, where this is one.
    """

    model: str
    method: str
    context: int
    meter: Meter
    device_memory: Callable[[], int] | None = None
    label: str = ""


class ProgressDisplay:
    """The progress on stderr. Draws nothing if not `shown` or where stderr is no terminal; text is always written.

    Loading and prefill are rich bars, because stdout is still silent; decoding is a `StatusLine` under the text.
    """

    def __init__(self, terminal: Terminal, shown: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = terminal
        self._shown = shown and terminal.shows_progress
        self._status = StatusLine(terminal, clock)
        self._bar: Progress | None = None
        self._facts: RunFacts | None = None
        terminal.before_line = self.hide

    def loading(self, text: str) -> None:
        """Show a spinner beside this text, until something else is shown."""
        if self._shown:
            self.hide()
            self._show_bar(SpinnerColumn(), _column("{task.description}")).add_task(text, total=None)

    def start(self, facts: RunFacts) -> None:
        """Prepare for the events of a generation: the model is loaded and prefill begins."""
        self.hide()
        self._facts = facts

    def event(self, event: Event) -> None:
        """Redraw after an event that the meter has observed."""
        if not self._shown or self._facts is None:
            return
        if isinstance(event, Prefilled):
            self._prefilled(event)
        elif isinstance(event, Tokens):
            self._hide_bar()
            if self._terminal.stdout_is_terminal or not self._terminal.text_may_show:
                self._status.refresh(self._decoding)  # text that comes back through a pipe cannot be drawn around

    def write(self, text: str) -> None:
        """Write text to stdout, around whatever is shown."""
        if text:
            if self._terminal.text_may_show:
                self._hide_bar()  # both would use the same line; the next event draws it again
            self._status.write(text)

    def hide(self) -> None:
        """Erase everything; the next event draws it again."""
        self._hide_bar()
        self._status.clear()

    def close(self) -> None:
        """Erase everything and draw nothing more. May be called again."""
        self.hide()
        self._shown = False

    def _prefilled(self, event: Prefilled) -> None:
        if self._bar is None:
            width = min(40, max(4, self._terminal.size()[0] - _PREFILL_TEXT))
            label = f"{self._facts.label} · prefill" if self._facts.label else "prefill"
            columns = (_column(label), BarColumn(bar_width=width), _Count(_ONE_LINE), _Estimate(self._facts.meter))
            self._show_bar(*columns).add_task("prefill", total=event.total, completed=event.done)
        else:
            self._bar.update(self._bar.task_ids[0], completed=event.done, total=event.total)

    def _show_bar(self, *columns: ProgressColumn) -> Progress:
        """Start and return a bar that leaves no trace. It must not touch sys.stdout, which belongs to the text."""
        self._bar = Progress(
            *columns,
            console=self._terminal.console(),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._bar.start()
        return self._bar

    def _hide_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def _decoding(self) -> Text:
        facts, meter = self._facts, self._facts.meter
        rate = meter.tokens_per_s
        segments = [
            *([_Segment(facts.label, "bold")] if facts.label else []),
            _Segment("decode", "bold"),
            _Segment(counted(meter.new_tokens, "token"), dropped=1),
            _Segment(f"{rate:.1f}/s" if rate else "…/s", "cyan"),
            *_speculation(facts.method, meter),
            _Segment(f"context {meter.prompt_tokens + meter.new_tokens:,}/{facts.context:,}", dropped=2),
            *_link(meter),
            *_memory(facts),
        ]
        return _fitted(segments, self._terminal.size()[0] - 1)


class _Segment(NamedTuple):
    """A piece of the status line. Those with the highest `dropped` are left out first, those with 0 never."""

    text: str
    style: str = ""
    dropped: int = 0


def _fitted(segments: Sequence[_Segment], columns: int) -> Text:
    segments = list(segments)
    while True:
        line = Text(" · ").join(Text(segment.text, style=segment.style) for segment in segments)
        least = max(segments, key=lambda segment: segment.dropped)
        if line.cell_len <= columns or least.dropped == 0:
            return line
        segments.remove(least)


def _speculation(method: str, meter: Meter) -> list[_Segment]:
    """Return the method and its current drafter, the acceptance of each drafter, and the tokens a verification."""
    if method == "auto" and meter.speculated is not None:
        using = meter.speculated.using
        method = f"auto: {'plain' if using == 'none' else using}"
    verified = [row for row in meter.levels if row.acceptance is not None]
    if not verified:
        return [_Segment(method)]
    drafters = [row.drafter for row in verified]
    # A drafter may draft for two levels; only then its name alone is ambiguous.
    names = [f"{row.drafter}→{row.verifier}" if drafters.count(row.drafter) > 1 else row.drafter for row in verified]
    rates = [f"{name} {percent(row.acceptance)}" for name, row in zip(names, verified, strict=True)]
    tokens = f"{tokens_per_verification(meter.levels):.1f}/verification"
    return [_Segment(method), _Segment(", ".join(rates)), _Segment(tokens)]


def _link(meter: Meter) -> list[_Segment]:
    """Return the bytes that went over the link, and the share of the time in which it was busy."""
    if meter.transferred is None:
        return []
    return [_Segment(f"link {size(meter.transferred.bytes)} {percent(meter.link_utilisation or 0.0)}", dropped=3)]


def _memory(facts: RunFacts) -> list[_Segment]:
    host = f"{psutil.Process().memory_info().rss / GIB:.1f} GiB"
    if facts.device_memory is None:
        return [_Segment(host, "dim", dropped=4)]
    return [_Segment(f"device {facts.device_memory() / GIB:.1f} GiB, host {host}", "dim", dropped=4)]


def _column(template: str) -> TextColumn:
    return TextColumn(template, markup=False)  # a model's name may hold brackets


class _Count(ProgressColumn):
    """Tokens done of all."""

    def render(self, task: Task) -> Text:
        return Text(f"{int(task.completed):,}/{counted(int(task.total or 0), 'token')}")


class _Estimate(ProgressColumn):
    """Prompt tokens per second so far, and the time left at that rate."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(_ONE_LINE)
        self._meter = meter

    def render(self, task: Task) -> Text:
        rate = self._meter.prefill_tokens_per_s
        if not rate:
            return Text("")
        left = math.ceil((self._meter.prompt_tokens - self._meter.prefilled_tokens) / rate)
        return Text(f"{rate:,.0f}/s · {left // 60}:{left % 60:02d} left", style="cyan")
