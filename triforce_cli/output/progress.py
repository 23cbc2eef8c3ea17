"""What a person sees on stderr while the engine works: loading, prefill, then decoding, one line each."""

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
    """What is known of a generation once the model is loaded; `context` is the model's length in tokens."""

    model: str
    method: str
    context: int
    prompt_tokens: int
    seed: int
    device_memory: Callable[[], int] | None = None  # bytes in use on a GPU, where the model runs on one
    label: str = ""  # which part of a larger work this is


class ProgressDisplay:
    """The moving part of stderr. Shows nothing where stderr cannot show it, or if told so; text passes all the same.

    Loading and prefill are rich bars, because stdout is still silent; decoding is a `StatusLine` under the text.
    """

    def __init__(self, terminal: Terminal, shown: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = terminal
        self._shown = shown and terminal.shows_progress
        self._clock = clock
        self._status = StatusLine(terminal, clock)
        self._bar: Progress | None = None
        self._facts: RunFacts | None = None
        self._meter: Meter | None = None
        terminal.before_line = self.hide

    def loading(self, text: str) -> None:
        """A spinner beside this text, until something else is shown."""
        if self._shown:
            self.hide()
            self._show_bar(SpinnerColumn(), _column("{task.description}")).add_task(text, total=None)

    def start(self, facts: RunFacts) -> None:
        """The model is loaded and prefill begins."""
        self.hide()
        self._facts = facts
        self._meter = Meter(facts.prompt_tokens, self._clock)

    def event(self, event: Event) -> None:
        if not self._shown or self._facts is None:
            return
        self._meter.observe(event)
        if isinstance(event, Prefilled):
            self._prefilled(event)
        elif isinstance(event, Tokens):
            self._hide_bar()
            if self._terminal.stdout_is_terminal or not self._terminal.text_may_show:
                self._status.refresh(self._decoding)  # text that comes back through a pipe cannot be drawn around

    def write(self, text: str) -> None:
        """Text to stdout, around whatever is shown."""
        if text:
            if self._terminal.text_may_show:
                self._hide_bar()  # they would share the line; the next event brings it back
            self._status.write(text)

    def hide(self) -> None:
        """Take everything away; the next event brings it back."""
        self._hide_bar()
        self._status.clear()

    def close(self) -> None:
        """Take everything away for good. May be called again."""
        self.hide()
        self._shown = False

    def _prefilled(self, event: Prefilled) -> None:
        if self._bar is None:
            width = min(40, max(4, self._terminal.size()[0] - _PREFILL_TEXT))
            label = f"{self._facts.label} · prefill" if self._facts.label else "prefill"
            columns = (_column(label), BarColumn(bar_width=width), _Count(_ONE_LINE), _Estimate(self._meter))
            self._show_bar(*columns).add_task("prefill", total=event.total, completed=event.done)
        else:
            self._bar.update(self._bar.task_ids[0], completed=event.done, total=event.total)

    def _show_bar(self, *columns: ProgressColumn) -> Progress:
        """A bar that leaves no trace. It must not touch sys.stdout, which belongs to the text."""
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
        facts, meter = self._facts, self._meter
        rate = meter.tokens_per_s
        parts = [
            *([_Part(facts.label, "bold")] if facts.label else []),
            _Part("decode", "bold"),
            _Part(counted(meter.new_tokens, "token"), rank=1),
            _Part(f"{rate:.1f}/s" if rate else "…/s", "cyan"),
            *_speculation(facts.method, meter),
            _Part(f"context {facts.prompt_tokens + meter.new_tokens:,}/{facts.context:,}", rank=2),
            *_link(meter),
            *_memory(facts),
        ]
        return _fitted(parts, self._terminal.size()[0] - 1)


class _Part(NamedTuple):
    """A piece of the status line. Where there is no room, those of the highest rank go first; rank 0 stays."""

    text: str
    style: str = ""
    rank: int = 0


def _fitted(parts: Sequence[_Part], columns: int) -> Text:
    parts = list(parts)
    while True:
        line = Text(" · ").join(Text(part.text, style=part.style) for part in parts)
        least = max(parts, key=lambda part: part.rank)
        if line.cell_len <= columns or least.rank == 0:
            return line
        parts.remove(least)


def _speculation(method: str, meter: Meter) -> list[_Part]:
    """The method and what it is doing, what was accepted of whose drafts, and what a verification brings."""
    if method == "auto" and meter.speculated is not None:
        using = meter.speculated.using
        method = f"auto: {'plain' if using == 'none' else using}"
    judged = [row for row in meter.levels if row.acceptance is not None]
    if not judged:
        return [_Part(method)]
    names = [row.drafter for row in judged]
    # A drafter may work for two levels; only then its name does not say which.
    said = [f"{row.drafter}→{row.verifier}" if names.count(row.drafter) > 1 else row.drafter for row in judged]
    rates = [f"{name} {percent(row.acceptance)}" for name, row in zip(said, judged, strict=True)]
    brings = f"{tokens_per_verification(meter.levels):.1f}/verification"
    return [_Part(method), _Part(", ".join(rates)), _Part(brings)]


def _link(meter: Meter) -> list[_Part]:
    """What went over the link, and how much of the time it was busy."""
    if meter.transferred is None:
        return []
    return [_Part(f"link {size(meter.transferred.bytes)} {percent(meter.link_utilisation or 0.0)}", rank=3)]


def _memory(facts: RunFacts) -> list[_Part]:
    host = f"{psutil.Process().memory_info().rss / GIB:.1f} GiB"
    if facts.device_memory is None:
        return [_Part(host, "dim", rank=4)]
    return [_Part(f"device {facts.device_memory() / GIB:.1f} GiB, host {host}", "dim", rank=4)]


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
