"""Progress on stderr: fetching and loading a model, prefill, then decoding, one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from offload.events import DraftPrefilled, Event, Pinned, Prefilled, Tokens
from offload.level_metrics import tokens_per_verification
from offload.metrics import Meter
from offload.units import GIB, counted

from .format import percent, size
from .prefill_bar import PrefillBar
from .status_line import StatusLine
from .tables import Segment, fitted
from .terminal import Terminal


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts of a generation that the display shows.

    Args:
        context: the model's, in tokens.
        meter: observes the generation's events before they are displayed.
        label: names the part of a document, where this is one.
        pass_tokens: returns how far the forward pass under way is, in tokens, for the bar within a chunk.
    """

    model: str
    method: str
    context: int
    meter: Meter
    label: str = ""
    pass_tokens: Callable[[], float] = lambda: 0.0


class ProgressDisplay:
    """The progress on stderr. Draws nothing if not `shown` or where stderr is no terminal; text is always written.

    Loading and prefill are rich bars, because stdout is still silent; decoding is a `StatusLine` under the text.
    """

    def __init__(self, terminal: Terminal, shown: bool = True) -> None:
        self._terminal = terminal
        self._shown = shown and terminal.shows_progress
        self._status = StatusLine(terminal)
        self._bar: Progress | PrefillBar | None = None
        self._facts: RunFacts | None = None
        terminal.before_line = self.hide

    def loading(self, text: str) -> None:
        """Show a spinner beside this text, until something else is shown."""
        if not self._shown:
            return
        if isinstance(self._bar, Progress):
            self._bar.update(self._bar.task_ids[0], description=text)
            return
        self.hide()
        # It must not touch sys.stdout, which belongs to the text.
        options = {"transient": True, "redirect_stdout": False, "redirect_stderr": False}
        self._bar = Progress(SpinnerColumn(), _DESCRIPTION, console=self._terminal.console(), **options)
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
            self._prefilled(event, self._facts)
        elif isinstance(event, Pinned):
            self.loading(f"pinning host memory: {event.done / GIB:.0f} of {event.total / GIB:.0f} GiB")
        elif isinstance(event, DraftPrefilled):
            self.loading(f"the draft model reads {event.done:,}/{event.total:,} tokens")
        elif isinstance(event, Tokens):
            self._hide_bar()
            if self._terminal.stdout_is_terminal or not self._terminal.text_may_show:
                self.status(self._decoding)  # text that comes back through a pipe cannot be drawn around

    def status(self, content: Callable[[], Text]) -> None:
        """Show a line, which `content` returns when it is time to draw it, instead of what is shown."""
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
        """Write what a model thinks to stderr, around whatever is shown."""
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

    def _prefilled(self, event: Prefilled, facts: RunFacts) -> None:
        bar = self._bar
        if not isinstance(bar, PrefillBar):
            self._hide_bar()
            label = f"{facts.label} · prefill" if facts.label else "prefill"
            bar = self._bar = PrefillBar(self._terminal, label, facts.meter, facts.pass_tokens)
        bar.observe(event)
        bar.start()

    def _hide_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def _decoding(self) -> Text:
        facts, meter = self._facts, self._facts.meter
        rate = meter.tokens_per_s
        segments = [
            *([Segment(facts.label, "bold")] if facts.label else []),
            Segment("decode", "bold"),
            Segment(counted(meter.new_tokens, "token"), dropped=1),
            Segment(f"{rate:.1f}/s" if rate else "…/s", "cyan"),
            *_speculation(facts.method, meter),
            Segment(f"context {meter.prompt_tokens + meter.new_tokens:,}/{facts.context:,}", dropped=2),
            *_link(meter),
        ]
        return fitted(segments, self._terminal.size()[0] - 1)


def _speculation(method: str, meter: Meter) -> list[Segment]:
    """Return the method and its current drafter, the acceptance of each drafter, and the tokens a verification."""
    if method == "auto" and meter.speculated is not None:
        using = meter.speculated.using
        method = f"auto: {'plain' if using == 'none' else using}"
    verified = [row for row in meter.levels if row.acceptance is not None]
    if not verified:
        return [Segment(method)]
    drafters = [row.drafter for row in verified]
    # A drafter may draft for two levels; only then its name alone is ambiguous.
    names = [f"{row.drafter}→{row.verifier}" if drafters.count(row.drafter) > 1 else row.drafter for row in verified]
    rates = [f"{name} {percent(row.acceptance)}" for name, row in zip(names, verified, strict=True)]
    return [
        Segment(method),
        Segment(", ".join(rates)),
        Segment(f"{tokens_per_verification(meter.levels):.1f}/verification"),
    ]


def _link(meter: Meter) -> list[Segment]:
    """Return the bytes that went over the link, or were read from disk, and the share of the time that takes."""
    if meter.transferred is None:
        return []
    return [Segment(f"link {size(meter.transferred.bytes)} {percent(meter.link_utilisation or 0.0)}", dropped=3)]


_DESCRIPTION = TextColumn("{task.description}", markup=False)  # a model's name may hold brackets


class DownloadBar(Progress):
    """A bar while a model is fetched: a context manager, called with what is fetched, units done and units in all.

    It draws nothing where stderr is no terminal.
    """

    def __init__(self, terminal: Terminal, shown: bool = True) -> None:
        columns = (_DESCRIPTION, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        is_shown = shown and terminal.shows_progress
        super().__init__(*columns, console=terminal.console(), transient=True, disable=not is_shown)
        self._terminal = terminal
        self._fetched: dict[str, int] = {}

    def __enter__(self) -> DownloadBar:
        return self

    def __call__(self, description: str, done: int, total: int) -> None:
        if description not in self._fetched:
            if not self._fetched and self._terminal.before_line is not None:
                self._terminal.before_line()  # erases the spinner
            self.start()  # only now: a model that is already on disk needs no bar
            self._fetched[description] = self.add_task(description, total=total)
        self.update(self._fetched[description], completed=done)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
